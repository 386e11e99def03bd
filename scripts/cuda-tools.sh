#!/usr/bin/env bash
# Downloads ptxas, cuobjdump and nvdisasm from NVIDIA's Python packages into build/cuda-tools. Only tests need them, to
# assemble generated PTX. Needs no CUDA toolkit and no GPU.
#
# If the download fails, the script reports which tests will be skipped and exits with 0, or with 1 if
# TILEWRIGHT_REQUIRE_PTXAS is 1. If TILEWRIGHT_PTXAS names an existing ptxas, nothing is downloaded.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source-path=SCRIPTDIR source=apt.sh
. scripts/apt.sh

wheels=(
    nvidia-cuda-nvcc==13.0.88 # ptxas
    nvidia-cuda-cuobjdump==13.2.86
    nvidia-cuda-nvdisasm==13.2.86
)
tools=build/cuda-tools
stamp=$tools/versions

# give_up REASON: reports the consequence and exits: with 1 if TILEWRIGHT_REQUIRE_PTXAS is 1, else with 0.
give_up() {
    echo "cuda-tools: $1" >&2
    echo "cuda-tools: without ptxas, tests that assemble generated PTX are skipped; all other tests run." >&2
    echo "cuda-tools: to run them, set TILEWRIGHT_PTXAS to the path of a ptxas of CUDA 12.4 or later." >&2
    [ "${TILEWRIGHT_REQUIRE_PTXAS:-0}" != 1 ] || exit 1
    exit 0
}

if [ -n "${TILEWRIGHT_PTXAS:-}" ]; then
    "$TILEWRIGHT_PTXAS" --version >/dev/null || {
        echo "cuda-tools: TILEWRIGHT_PTXAS is $TILEWRIGHT_PTXAS, but \`$TILEWRIGHT_PTXAS --version\` fails; set it to a working ptxas." >&2
        exit 1
    }
    exit 0
fi
if [ -e "$stamp" ] && [ "$(cat "$stamp")" = "${wheels[*]}" ]; then
    exit 0
fi

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# A temporary virtual environment provides pip, independent of the configuration of the system's Python.
make_venv() {
    rm -rf "$scratch/venv"
    python3 -m venv "$scratch/venv" >"$scratch/venv.log" 2>&1
}

# Debian and Ubuntu package venv separately from python3.
install_venv() {
    if ! command -v apt-get >/dev/null || ! can_become_root; then
        return 1
    fi
    echo "cuda-tools: installing python3-venv"
    apt_update
    apt install --no-install-recommends python3-venv
}

if ! make_venv; then
    { install_venv && make_venv; } ||
        give_up "python3 with the venv module (Debian: python3-venv) was not found and could not be installed."
fi

echo "cuda-tools: downloading ${wheels[*]}"
mkdir -p build
rm -rf "$tools.partial"
"$scratch/venv/bin/pip" install -q --no-deps --only-binary :all: --target "$tools.partial" "${wheels[@]}" </dev/null ||
    give_up "pip could not download the packages; see its messages above."
"$tools.partial/nvidia/cu13/bin/ptxas" --version >/dev/null || give_up "the downloaded ptxas does not run on this machine."
printf '%s\n' "${wheels[*]}" >"$tools.partial/versions"
# Renamed only when complete, so that an interrupted download is not mistaken for a complete one.
rm -rf "$tools"
mv "$tools.partial" "$tools"
