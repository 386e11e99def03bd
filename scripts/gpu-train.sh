#!/usr/bin/env bash
# Builds `tilewright` with models on GPUs (candle's CUDA back end, NCCL) into build/gpu-train, with all that `make gpu-package` has, and the
# scripts that check and measure both on a GPU machine: docs/gpu-testing.md. That machine needs CUDA's libraries, and neither Rust nor nvcc.
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

# made PATTERN ARGS...: runs cargo, and prints the path of the executable that it made under a name like that.
made() {
    local pattern=$1
    shift
    cargo "$@" --release --message-format=json-render-diagnostics |
        sed -n '/"reason":"compiler-artifact"/ s/.*"executable":"\([^"]*\)".*/\1/p' | grep -E "/$pattern\$" | tail -n 1
}

echo "gpu-train: building"
models=(-p tilewright-harness --features cuda,nccl)
strip -o "$contents/tilewright" "$(made tilewright build "${models[@]}" --bin tilewright)"
strip -o "$contents/leaderboard" "$(made leaderboard build "${models[@]}" --bin leaderboard)"
# The tests of ranks, of which those between GPUs count there. Cargo names a test's binary after a hash.
strip -o "$contents/rank-tests" "$(made 'dist-[0-9a-f]+' test "${models[@]}" --test dist --no-run)"
for name in gpu gpu_random; do
    strip -o "$contents/$name" "$(made "$name-[0-9a-f]+" test -p tilewright-tests --test "$name" --no-run)"
done
cp scripts/reference_model.py scripts/train_tables.py "$contents"

commit=$(git rev-parse --short=12 HEAD 2>/dev/null || echo unknown)
if [ "$commit" != unknown ] && [ -n "$(git status --porcelain --untracked-files=no)" ]; then
    commit=$commit-changed
fi
echo "$commit" >"$contents/commit"

echo "gpu-train: compressing"
# The binaries share most of their code: a window that reaches from one to the next finds it again.
tar -C "$contents" -cf "$scratch/package.tar" commit reference_model.py train_tables.py gpu gpu_random leaderboard tilewright rank-tests
xz --threads=1 --lzma2=preset=6,dict=384MiB -c "$scratch/package.tar" >"$scratch/package.tar.xz"
mv "$scratch/package.tar.xz" "$out/package.tar.xz"
cp scripts/train-check.sh scripts/gpu-check.sh scripts/check-common.sh scripts/peers_sweep.py "$out/"
echo "gpu-train: $out has package.tar.xz ($(du -h "$out/package.tar.xz" | cut -f1), commit $commit) and the scripts that use it."
echo "On the machine with the GPU: ./train-check.sh smoke, and ./gpu-check.sh"
