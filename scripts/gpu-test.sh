#!/usr/bin/env bash
# Builds the GPU numerics tests as one file, build/gpu-test.xz, to carry to a machine with a GPU. That machine needs
# neither Rust nor LLVM nor a CUDA toolkit: docs/building.md says what it needs.
set -euo pipefail
cd "$(dirname "$0")/.."

echo "gpu-test: building"
# Cargo names the test binary after a hash of how it was built; its own messages say where it went.
binary=$(cargo test --release -p tilewright-tests --test gpu --no-run --message-format=json-render-diagnostics |
    sed -n '/"reason":"compiler-artifact"/ s/.*"executable":"\([^"]*\/gpu-[^"\/]*\)".*/\1/p' | tail -n 1)
[ -n "$binary" ] || { echo "gpu-test: cargo did not name the test binary it built; please report" >&2; exit 1; }

mkdir -p build
strip -o build/gpu-test "$binary"
xz --force --threads=0 build/gpu-test
echo "gpu-test: build/gpu-test.xz ($(du -h build/gpu-test.xz | cut -f1)). On the machine with the GPU:"
echo "    xz -d gpu-test.xz && chmod +x gpu-test && ./gpu-test"
