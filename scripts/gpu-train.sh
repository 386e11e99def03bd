#!/usr/bin/env bash
# Builds `tilewright` with models on GPUs (candle's CUDA back end, NCCL) into build/gpu-train, with the scripts that check and measure
# training on a GPU machine: docs/gpu-testing.md. That machine needs CUDA's libraries, and neither Rust nor nvcc.
#
# Wants a CUDA toolkit: the one of CUDA_HOME, or what `make cuda-setup` fetched. CUDA_COMPUTE_CAP says for which GPUs (90: H100, H200).
set -euo pipefail
cd "$(dirname "$0")/.."

if [ -z "${CUDA_HOME:-}" ]; then
    [ -e build/cuda-toolkit/env.sh ] || scripts/cuda-setup.sh
    # shellcheck disable=SC1091
    . build/cuda-toolkit/env.sh
fi
export CUDA_COMPUTE_CAP=${CUDA_COMPUTE_CAP:-90}

out=build/gpu-train
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
contents=$scratch/contents
mkdir -p "$out" "$contents"

echo "gpu-train: building"
program=$(cargo build --release -p tilewright-harness --bin tilewright --features cuda,nccl --message-format=json-render-diagnostics |
    sed -n '/"reason":"compiler-artifact"/ s/.*"executable":"\([^"]*\)".*/\1/p' | grep -E '/tilewright$' | tail -n 1)
strip -o "$contents/tilewright" "$program"
# The tests of ranks, of which those between GPUs count there.
tests=$(cargo test --release -p tilewright-harness --test dist --features cuda,nccl --no-run --message-format=json-render-diagnostics |
    sed -n '/"reason":"compiler-artifact"/ s/.*"executable":"\([^"]*\)".*/\1/p' | grep -E '/dist-[0-9a-f]+$' | tail -n 1)
strip -o "$contents/rank-tests" "$tests"
cp scripts/reference_model.py scripts/train_tables.py "$contents"

commit=$(git rev-parse --short=12 HEAD 2>/dev/null || echo unknown)
if [ "$commit" != unknown ] && [ -n "$(git status --porcelain --untracked-files=no)" ]; then
    commit=$commit-changed
fi
echo "$commit" >"$contents/commit"

echo "gpu-train: compressing"
tar -C "$contents" -cf "$scratch/package.tar" commit reference_model.py train_tables.py tilewright rank-tests
xz --threads=1 --lzma2=preset=6,dict=64MiB -c "$scratch/package.tar" >"$scratch/package.tar.xz"
mv "$scratch/package.tar.xz" "$out/package.tar.xz"
cp scripts/train-check.sh scripts/check-common.sh "$out/"
echo "gpu-train: $out has package.tar.xz ($(du -h "$out/package.tar.xz" | cut -f1), commit $commit), train-check.sh and check-common.sh."
echo "On the machine with the GPU: ./train-check.sh smoke"
