#!/usr/bin/env bash
# Builds build/gpu: package.tar.xz with the programs that test and benchmark Tilewright on a GPU machine, and the scripts that
# run them. The GPU machine needs no Rust, LLVM or CUDA toolkit (docs/gpu-testing.md).
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/package-common.sh
source scripts/package-common.sh

echo "gpu-package: building"
for name in tilewright leaderboard; do
    put "$name" "$name" build -p tilewright-harness --bin "$name"
done
put_gpu_tests accesses dot_shapes kernels_interpreted launch pipelined_loops pointer_loads
pack build/gpu 256MiB scripts/gpu-check.sh
echo "On the GPU machine: ./gpu-check.sh"
