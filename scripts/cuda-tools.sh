#!/usr/bin/env bash
# Fetches ptxas, cuobjdump and nvdisasm into build/cuda-tools, from the packages that NVIDIA publishes for Python.
# Only tests need them: they assemble the generated PTX. No CUDA toolkit and no GPU is involved.
#
# Where that is not possible, the script says what is lost and succeeds, unless TILEWRIGHT_REQUIRE_PTXAS is 1.
# TILEWRIGHT_PTXAS names a ptxas of your own; nothing is fetched then.
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

# give_up REASON: says what is lost, and fails only where the caller insists on ptxas.
give_up() {
    echo "cuda-tools: $1" >&2
    echo "cuda-tools: without ptxas, the tests that assemble generated PTX are skipped; the rest of the tests run." >&2
    echo "cuda-tools: if you have a ptxas of CUDA 12.4 or later, set TILEWRIGHT_PTXAS to its path." >&2
    [ "${TILEWRIGHT_REQUIRE_PTXAS:-0}" != 1 ] || exit 1
    exit 0
}

if [ -n "${TILEWRIGHT_PTXAS:-}" ]; then
    "$TILEWRIGHT_PTXAS" --version >/dev/null || {
        echo "cuda-tools: TILEWRIGHT_PTXAS is $TILEWRIGHT_PTXAS, which does not run as ptxas does." >&2
        exit 1
    }
    exit 0
fi
if [ -e "$stamp" ] && [ "$(cat "$stamp")" = "${wheels[*]}" ]; then
    exit 0
fi

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# A throwaway virtual environment: what it takes for a pip of our own, whatever the system's Python is set up for.
make_venv() {
    rm -rf "$scratch/venv"
    python3 -m venv "$scratch/venv" >"$scratch/venv.log" 2>&1
}

# Debian and Ubuntu split venv from Python: a machine with python3 alone cannot make one.
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
        give_up "python3 with its venv module is missing (Debian: python3-venv), and could not be installed."
fi

echo "cuda-tools: fetching ${wheels[*]}"
mkdir -p build
rm -rf "$tools.partial"
"$scratch/venv/bin/pip" install -q --no-deps --only-binary :all: --target "$tools.partial" "${wheels[@]}" </dev/null ||
    give_up "pip could not fetch the packages; its own messages above say why."
"$tools.partial/nvidia/cu13/bin/ptxas" --version >/dev/null || give_up "the fetched ptxas does not run on this machine."
printf '%s\n' "${wheels[*]}" >"$tools.partial/versions"
# Renamed only once complete, so that an interrupted run is not taken for a finished one.
rm -rf "$tools"
mv "$tools.partial" "$tools"
