#!/usr/bin/env bash
# Builds build/gpu-train: `tilewright` with GPU training (candle's CUDA backend, NCCL), everything that `make gpu-package` builds, and
# the scripts that test and benchmark both on a GPU machine (docs/gpu-testing.md). That machine needs CUDA's libraries, but no Rust
# and no nvcc.
#
# Requires a CUDA toolkit: the one in CUDA_HOME, or the one that `make cuda-setup` assembles. CUDA_COMPUTE_CAP is the compute capability
# to build for (90 by default: H100, H200).
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/package-common.sh
source scripts/package-common.sh

if [ -z "${CUDA_HOME:-}" ]; then
    [ -e build/cuda-toolkit/env.sh ] || scripts/cuda-setup.sh
    # shellcheck disable=SC1091
    . build/cuda-toolkit/env.sh
fi
export CUDA_COMPUTE_CAP=${CUDA_COMPUTE_CAP:-90}

echo "gpu-train: building"
models=(-p tilewright-harness --features cuda,nccl)
for name in tilewright leaderboard; do
    put "$name" "$name" build "${models[@]}" --bin "$name"
done
# The multi-rank tests; the GPU machine runs those over NCCL.
put rank-tests 'dist-[0-9a-f]+' test "${models[@]}" --test dist --no-run
put_gpu_tests
cp scripts/reference_model.py scripts/train_tables.py "$contents"
pack build/gpu-train 384MiB scripts/train-check.sh scripts/gpu-check.sh
echo "On the GPU machine: ./train-check.sh smoke, and ./gpu-check.sh"
