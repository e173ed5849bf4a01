#!/usr/bin/env bash
# Training on a CUDA machine, each stage within one call of ten minutes:
#   OUT=/some/folder GIT_COMMIT=... bash benchmarks/gpu_training.sh tests | rows NAMES [options of step.py]
#   tests            the GPU tests of memory, planner and step                         about 2 minutes
#   rows 8b-ckpt,8b  rows of the table of training steps, ours, hf and liger           about 25 s a run of 8B, 15 s else
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
stage=${1:-tests}
shift
case $stage in
tests)
  timeout 540 python3 -m pytest -q -m gpu -n "${JOBS:-3}" --durations=10 tests/test_memory.py tests/test_planner.py \
    tests/test_step.py "$@" 2>&1 | tee "$OUT/pytest-training.log" | tail -80
  exit "${PIPESTATUS[0]}"
  ;;
rows)
  rows=$1
  shift
  timeout 590 python3 benchmarks/step.py --table --rows "$rows" --out-dir "$OUT" "$@" 2>"$OUT/rows.err"
  status=$?
  grep -v Warning "$OUT/rows.err" | tail -15
  echo "${SECONDS} s, status $status"
  exit $status
  ;;
*)
  sed -n 2,6p "$0"
  exit 2
  ;;
esac
