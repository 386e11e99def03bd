#!/usr/bin/env bash
# Makes this machine able to build and run ranks over MPI (the harness's feature `mpi`): Open MPI, and libclang for its bindings.
# What is there already, from any source, is left alone.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=apt.sh
. "$(dirname "$0")/apt.sh"

missing=()
command -v mpicc >/dev/null || missing+=(libopenmpi-dev)
command -v mpirun >/dev/null || missing+=(openmpi-bin)
# Where bindgen looks: a folder that LIBCLANG_PATH names, llvm-config's, or the system's.
has_libclang() {
    [ -n "${LIBCLANG_PATH:-}" ] && return
    local file
    # libclang-cpp is another library; and a package may leave links to files of one that is not installed.
    for file in /usr/lib/llvm-*/lib/libclang{,-[0-9]*}.so* /usr/lib/*-linux-gnu/libclang{,-[0-9]*}.so*; do
        [ -e "$file" ] && return
    done
    return 1
}
has_libclang || missing+=(libclang-dev)

if [ "${#missing[@]}" -eq 0 ]; then
    exit
fi
if ! command -v apt-get >/dev/null || ! can_become_root; then
    echo "mpi-setup: install Open MPI with its development files, and libclang (on Debian and Ubuntu: apt-get install ${missing[*]})" >&2
    exit 1
fi
apt_update
apt install --no-install-recommends "${missing[@]}"
