#!/usr/bin/env bash
# One call on a CUDA machine, within 9 minutes: the GPU tests, then Llama-3-8B's training step beside its peers.
#   GIT_COMMIT=$(git rev-parse HEAD) OUT=/some/folder bash benchmarks/gpu_ground.sh
# Wheels in .whl/ (Liger-Kernel, where there is no registry to install it from) are put in a folder of their own.
set -uo pipefail
cd "$(dirname "$0")/.."
OUT=${OUT:-runs/gpu}
mkdir -p "$OUT"
export PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false
SITE=$(mktemp -d)
if compgen -G '.whl/*.whl' >/dev/null; then
  python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$SITE" .whl/*.whl || exit
fi
ln -s "$PWD/ligermodels" "$SITE/ligermodels" # not the checkout itself: transformers would take its kernels/ for another package
export PYTHONPATH=$SITE
status=0

nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader
timeout 230 python3 -m pytest -q -m gpu -n "${JOBS:-5}" --durations=8 2>&1 | tee "$OUT/pytest-gpu.log" | tail -60
[ "${PIPESTATUS[0]}" = 0 ] || { status=1; echo "GPU TESTS FAILED (or ran into the limit): see pytest-gpu.log"; }
echo "tests: ${SECONDS} s"

timeout $((500 - SECONDS)) python3 benchmarks/step.py --model llama3-8b --batch 4 --seq 4096 --checkpointing \
  --peers ours,hf,liger --timeout 95 --out "$OUT/step-llama3-8b-ckpt.json" 2>"$OUT/step.err" || status=1
grep -v Warning "$OUT/step.err" | tail -15
echo "step: ${SECONDS} s"

if [ "$SECONDS" -lt 455 ]; then # where the time goes, if there is time left
  timeout $((530 - SECONDS)) python3 benchmarks/step.py --model llama3-8b --batch 4 --seq 4096 --checkpointing \
    --peers ours --steps 1 --warmup 2 --profile --timeout 70 --out "$OUT/profile-llama3-8b-ckpt.json" 2>&1 |
    grep -v Warning | cut -c1-130 | head -45
fi
echo "total: ${SECONDS} s, status $status"
exit $status
