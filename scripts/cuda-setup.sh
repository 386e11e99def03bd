#!/usr/bin/env bash
# Makes build/cuda-toolkit: what `cargo build --features tilewright-harness/cuda` needs of a CUDA toolkit, from the packages that NVIDIA publishes
# for Python. No driver, no GPU and no root are involved; an installed toolkit does as well, and then this is not needed.
#
# The feature builds candle's own CUDA back end, whose kernels nvcc compiles. Tilewright's kernels need none of it.
set -euo pipefail
cd "$(dirname "$0")/.."

wheels=(
    nvidia-cuda-nvcc==13.0.88 nvidia-nvvm==13.0.88 nvidia-cuda-crt==13.0.88 # the compiler
    nvidia-cuda-runtime==13.0.96 nvidia-cuda-cccl==13.0.85                  # what its kernels include
    nvidia-cublas==13.1.0.3 nvidia-curand==10.4.0.35 nvidia-cuda-nvrtc==13.0.88 # what candle links
    nvidia-nccl-cu13==2.28.9 nvidia-cuda-cupti==13.0.85                     # collectives, profiles
)
home=$PWD/build/cuda-toolkit
stamp=$home/versions
# A GPU of compute capability 8.0 or later runs code for 8.0 too; CUDA_COMPUTE_CAP=90 builds for an H100 or H200 alone.
capability=${CUDA_COMPUTE_CAP:-90}

fail() {
    echo "cuda-setup: $1" >&2
    exit 1
}

# Links of the toolkit's usual names: headers and libraries side by side, `lib64`, and names without versions to link against.
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

# A libcuda.so to link against: the driver brings the real one. It has every name of cuda.h and of the bindings that we use.
stub_driver() {
    local root=$1 bindings
    bindings=$(cargo metadata --format-version 1 |
        python3 -c 'import json,sys,os; print(next(os.path.dirname(p["manifest_path"]) for p in json.load(sys.stdin)["packages"] if p["name"]=="cudarc"))')
    {
        grep -ohE '\bcu[A-Z][A-Za-z0-9_]*' "$root/include/cuda.h"
        grep -ohE '\bfn cu[A-Z][A-Za-z0-9_]*' "$bindings/src/driver/sys/mod.rs" | cut -c4-
    } | sort -u | sed 's/.*/int &(void) { return 100; }/' >"$root/stub.c"
    # The names are what counts. Where the stub is all there is, each call says that there is no GPU (CUDA_ERROR_NO_DEVICE).
    cc -w -shared -fPIC -Wl,-soname,libcuda.so.1 -o "$root/lib/libcuda.so" "$root/stub.c"
    rm "$root/stub.c"
}

if ! { [ -e "$stamp" ] && [ "$(cat "$stamp")" = "${wheels[*]}" ]; }; then
    scratch=$(mktemp -d)
    trap 'rm -rf "$scratch"' EXIT
    python3 -m venv "$scratch/venv" >/dev/null 2>&1 ||
        fail "python3 with its venv module is missing: install it (Debian: python3-venv)."
    echo "cuda-setup: fetching ${wheels[*]}"
    "$scratch/venv/bin/pip" install -q --no-deps --only-binary :all: --target "$scratch/packages" "${wheels[@]}" </dev/null ||
        fail "pip could not fetch the packages; its own messages above say why."
    rm -rf "$home.partial"
    arrange "$scratch/packages" "$home.partial"
    stub_driver "$home.partial"
    "$home.partial/bin/nvcc" --version >/dev/null || fail "the fetched nvcc does not run on this machine."
    printf '%s\n' "${wheels[*]}" >"$home.partial/versions"
    rm -rf "$home"
    mv "$home.partial" "$home"
fi

cat >"$home/env.sh" <<END
# source build/cuda-toolkit/env.sh, then: cargo build --release --features tilewright-harness/cuda
export CUDA_HOME="$home" CUDA_PATH="$home" CUDA_ROOT="$home" CUDA_TOOLKIT_ROOT_DIR="$home" CUDA_COMPUTE_CAP="$capability"
export PATH="$home/bin:\$PATH"
export LIBRARY_PATH="$home/lib\${LIBRARY_PATH:+:\$LIBRARY_PATH}"
# At run time the real driver is found first, by its versioned name; the rest is here.
export LD_LIBRARY_PATH="\${LD_LIBRARY_PATH:+\$LD_LIBRARY_PATH:}$home/lib"
END
echo "cuda-setup: done. Now: source build/cuda-toolkit/env.sh && cargo build --release --features tilewright-harness/cuda"
