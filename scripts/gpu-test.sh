#!/usr/bin/env bash
# Builds build/gpu-test.xz: the GPU numerics tests as one file, to copy to a GPU machine. The GPU machine needs no Rust, LLVM
# or CUDA toolkit; docs/building.md lists its requirements.
set -euo pipefail
cd "$(dirname "$0")/.."

echo "gpu-test: building"
# Cargo appends a hash of the build configuration to the name of the test binary, and reports its path in its JSON messages.
binary=$(cargo test --release -p tilewright-tests --test gpu --no-run --message-format=json-render-diagnostics |
    sed -n '/"reason":"compiler-artifact"/ s/.*"executable":"\([^"]*\/gpu-[^"\/]*\)".*/\1/p' | tail -n 1)
[ -n "$binary" ] || { echo "gpu-test: found no test binary in cargo's JSON messages; please report this" >&2; exit 1; }

mkdir -p build
strip -o build/gpu-test "$binary"
xz --force --threads=0 build/gpu-test
echo "gpu-test: build/gpu-test.xz ($(du -h build/gpu-test.xz | cut -f1)). On the GPU machine:"
echo "    xz -d gpu-test.xz && chmod +x gpu-test && ./gpu-test"
