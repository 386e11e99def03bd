#!/usr/bin/env bash
# Installs the requirements of ranks over MPI (the feature `mpi` of the harness): Open MPI, and libclang, which generates its bindings.
# Existing installations from any source are used and left unchanged.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=apt.sh
. "$(dirname "$0")/apt.sh"

missing=()
command -v mpicc >/dev/null || missing+=(libopenmpi-dev)
command -v mpirun >/dev/null || missing+=(openmpi-bin)
# Searches where bindgen does: LIBCLANG_PATH, llvm-config's folder, the system's library folders.
has_libclang() {
    [ -n "${LIBCLANG_PATH:-}" ] && return
    local file
    # libclang-cpp is a different library, which the patterns exclude. -e rejects dangling links, which some packages install.
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
    echo "mpi-setup: Open MPI (with development files) or libclang is missing, and this user cannot run apt-get as root." \
        "Install them (Debian, Ubuntu: apt-get install ${missing[*]})." >&2
    exit 1
fi
apt_update
apt install --no-install-recommends "${missing[@]}"
