#!/usr/bin/env bash
# Builds what a GPU machine needs to check and measure Tilewright into one file, build/gpu/package.tar.xz, and puts the
# scripts that use it beside it. That machine needs neither Rust nor LLVM nor a CUDA toolkit: docs/gpu-testing.md.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/package-common.sh
source scripts/package-common.sh

echo "gpu-package: building"
for name in tilewright leaderboard; do
    put "$name" "$name" build -p tilewright-harness --bin "$name"
done
put_gpu_tests
pack build/gpu 256MiB scripts/gpu-check.sh
echo "On the machine with the GPU: ./gpu-check.sh"
