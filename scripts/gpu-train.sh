#!/usr/bin/env bash
# Builds `tilewright` with models on GPUs (candle's CUDA back end, NCCL) into build/gpu-train, with all that `make gpu-package` has, and the
# scripts that check and measure both on a GPU machine: docs/gpu-testing.md. That machine needs CUDA's libraries, and neither Rust nor nvcc.
#
# Wants a CUDA toolkit: the one of CUDA_HOME, or what `make cuda-setup` fetched. CUDA_COMPUTE_CAP says for which GPUs (90: H100, H200).
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
# The tests of ranks, of which those between GPUs count there.
put rank-tests 'dist-[0-9a-f]+' test "${models[@]}" --test dist --no-run
put_gpu_tests
cp scripts/reference_model.py scripts/train_tables.py "$contents"
pack build/gpu-train 384MiB scripts/train-check.sh scripts/gpu-check.sh
echo "On the machine with the GPU: ./train-check.sh smoke, and ./gpu-check.sh"
