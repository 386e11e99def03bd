#!/usr/bin/env bash
# Builds what a GPU machine needs to check and measure Tilewright into one file, build/gpu/package.tar.xz, and puts the
# scripts that use it beside it. That machine needs neither Rust nor LLVM nor a CUDA toolkit: docs/gpu-testing.md.
set -euo pipefail
cd "$(dirname "$0")/.."

out=build/gpu
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
contents=$scratch/contents
mkdir -p "$out" "$contents"

# build ARGS...: runs cargo, and prints the paths of the executables that it made.
build() {
    cargo "$@" --release --message-format=json-render-diagnostics |
        sed -n '/"reason":"compiler-artifact"/ s/.*"executable":"\([^"]*\)".*/\1/p'
}

echo "gpu-package: building"
programs=$(build build -p tilewright-harness --bin tilewright --bin leaderboard)
for name in tilewright leaderboard; do
    strip -o "$contents/$name" "$(grep -E "/$name\$" <<<"$programs" | tail -n 1)"
done
# Cargo names a test's binary after a hash of how it was built: the name before the hash is the test's.
tests=$(build test -p tilewright-tests --test gpu --test gpu_random --no-run)
for name in gpu gpu_random; do
    binary=$(grep -E "/$name-[0-9a-f]+$" <<<"$tests" | tail -n 1) || {
        echo "gpu-package: cargo did not name the binary of the test '$name'; please report" >&2
        exit 1
    }
    strip -o "$contents/$name" "$binary"
done

commit=$(git rev-parse --short=12 HEAD 2>/dev/null || echo unknown)
if [ "$commit" != unknown ] && [ -n "$(git status --porcelain --untracked-files=no)" ]; then
    commit=$commit-changed
fi
echo "$commit" >"$contents/commit"

# The binaries share most of their code, LLVM: a window that reaches from one to the next finds it again.
echo "gpu-package: compressing"
tar -C "$contents" -cf "$scratch/package.tar" commit gpu gpu_random leaderboard tilewright
xz --threads=1 --lzma2=preset=6,dict=256MiB -c "$scratch/package.tar" >"$scratch/package.tar.xz"
mv "$scratch/package.tar.xz" "$out/package.tar.xz"
cp scripts/gpu-check.sh scripts/check-common.sh scripts/peers_sweep.py "$out/"
echo "gpu-package: $out has package.tar.xz ($(du -h "$out/package.tar.xz" | cut -f1), commit $commit), gpu-check.sh, check-common.sh and peers_sweep.py."
echo "On the machine with the GPU: ./gpu-check.sh"
