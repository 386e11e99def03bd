# shellcheck shell=bash
# Functions that install packages on Debian and Ubuntu; sourced by the other scripts in this folder.

# Succeeds for root, with passwordless sudo, and with sudo on a terminal where the user can type the password.
can_become_root() {
    [ "$(id -u)" -eq 0 ] && return
    command -v sudo >/dev/null || return 1
    [ -t 0 ] || sudo -n true 2>/dev/null
}

# apt COMMAND...: runs apt-get as root, non-interactively; waits up to 300 s for dpkg's lock.
apt() {
    local command=(env DEBIAN_FRONTEND=noninteractive apt-get -q -y -o DPkg::Lock::Timeout=300 -o Dpkg::Use-Pty=0 "$@")
    if [ "$(id -u)" -ne 0 ]; then
        command=(sudo "${command[@]}")
    fi
    "${command[@]}" </dev/null
}

# One broken third-party source makes the whole update fail, although the packages we need may be available: continue.
apt_update() {
    apt update || echo "apt-get update failed; continuing with the existing package lists" >&2
}
