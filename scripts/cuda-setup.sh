#!/usr/bin/env bash
# Assembles build/cuda-toolkit from NVIDIA's Python packages: the parts of a CUDA toolkit that
# `cargo build --features tilewright-harness/cuda` needs. Not needed if a CUDA toolkit is installed. Needs no driver, GPU or root.
#
# The feature builds candle's CUDA backend, whose kernels nvcc compiles. Tilewright's own kernels do not need it.
set -euo pipefail
cd "$(dirname "$0")/.."

wheels=(
    nvidia-cuda-nvcc==13.0.88 nvidia-nvvm==13.0.88 nvidia-cuda-crt==13.0.88 # compiler
    nvidia-cuda-runtime==13.0.96 nvidia-cuda-cccl==13.0.85                  # headers that candle's kernels include
    nvidia-cublas==13.1.0.3 nvidia-curand==10.4.0.35 nvidia-cuda-nvrtc==13.0.88 # linked by candle
    nvidia-nccl-cu13==2.28.9 nvidia-cuda-cupti==13.0.85                     # collectives, profiles
)
home=$PWD/build/cuda-toolkit
stamp=$home/versions
# The compute capability to build for. 90 is for H100 and H200 only; code for 80 runs on every GPU of 8.0 or later.
capability=${CUDA_COMPUTE_CAP:-90}

fail() {
    echo "cuda-setup: $1" >&2
    exit 1
}

# arrange PACKAGES ROOT: lays out the packages like a toolkit: all headers and libraries in one tree, a `lib64` link, and unversioned
# library names for the linker.
arrange() {
    local packages=$1 root=$2 part library plain
    mkdir -p "$root/lib" "$root/include" "$root/bin"
    for part in "$packages"/nvidia/cu13 "$packages"/nvidia/nccl "$packages"/nvidia/cuda_cupti; do
        [ -d "$part" ] && cp -a "$part"/. "$root"/
    done
    ln -sfn lib "$root/lib64"
    for library in "$root"/lib/*.so.*; do
        plain=${library%%.so.*}.so
        [ -e "$plain" ] || ln -s "$(basename "$library")" "$plain"
    done
}

# stub_driver ROOT: builds a stub libcuda.so to link against; the real one comes with the driver. The stub defines every symbol of
# cuda.h and of cudarc's bindings.
stub_driver() {
    local root=$1 bindings
    bindings=$(cargo metadata --format-version 1 |
        python3 -c 'import json,sys,os; print(next(os.path.dirname(p["manifest_path"]) for p in json.load(sys.stdin)["packages"] if p["name"]=="cudarc"))')
    {
        grep -ohE '\bcu[A-Z][A-Za-z0-9_]*' "$root/include/cuda.h"
        grep -ohE '\bfn cu[A-Z][A-Za-z0-9_]*' "$bindings/src/driver/sys/mod.rs" | cut -c4-
    } | sort -u | sed 's/.*/int &(void) { return 100; }/' >"$root/stub.c"
    # Only the symbols matter. If the stub is loaded for lack of a driver, every call returns 100 (CUDA_ERROR_NO_DEVICE).
    cc -w -shared -fPIC -Wl,-soname,libcuda.so.1 -o "$root/lib/libcuda.so" "$root/stub.c"
    rm "$root/stub.c"
}

if ! { [ -e "$stamp" ] && [ "$(cat "$stamp")" = "${wheels[*]}" ]; }; then
    scratch=$(mktemp -d)
    trap 'rm -rf "$scratch"' EXIT
    python3 -m venv "$scratch/venv" >/dev/null 2>&1 ||
        fail "python3 with the venv module was not found: install it (Debian: python3-venv)."
    echo "cuda-setup: downloading ${wheels[*]}"
    "$scratch/venv/bin/pip" install -q --no-deps --only-binary :all: --target "$scratch/packages" "${wheels[@]}" </dev/null ||
        fail "pip could not download the packages; see its messages above."
    rm -rf "$home.partial"
    arrange "$scratch/packages" "$home.partial"
    stub_driver "$home.partial"
    "$home.partial/bin/nvcc" --version >/dev/null || fail "the downloaded nvcc does not run on this machine."
    printf '%s\n' "${wheels[*]}" >"$home.partial/versions"
    rm -rf "$home"
    mv "$home.partial" "$home"
fi

cat >"$home/env.sh" <<END
# source build/cuda-toolkit/env.sh, then: cargo build --release --features tilewright-harness/cuda
export CUDA_HOME="$home" CUDA_PATH="$home" CUDA_ROOT="$home" CUDA_TOOLKIT_ROOT_DIR="$home" CUDA_COMPUTE_CAP="$capability"
export PATH="$home/bin:\$PATH"
export LIBRARY_PATH="$home/lib\${LIBRARY_PATH:+:\$LIBRARY_PATH}"
# The real driver library is found first, by its versioned name; the other libraries are here.
export LD_LIBRARY_PATH="\${LD_LIBRARY_PATH:+\$LD_LIBRARY_PATH:}$home/lib"
END
echo "cuda-setup: done. Now: source build/cuda-toolkit/env.sh && cargo build --release --features tilewright-harness/cuda"
