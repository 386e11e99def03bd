# shellcheck shell=bash
# Installing packages on Debian and Ubuntu; sourced by the scripts beside it.

# Root already, sudo without a password, or a person at the terminal to type it.
can_become_root() {
    [ "$(id -u)" -eq 0 ] && return
    command -v sudo >/dev/null || return 1
    [ -t 0 ] || sudo -n true 2>/dev/null
}

# apt COMMAND...: apt-get as root, that asks nothing and waits where another installer is at work.
apt() {
    local command=(env DEBIAN_FRONTEND=noninteractive apt-get -q -y -o DPkg::Lock::Timeout=300 -o Dpkg::Use-Pty=0 "$@")
    if [ "$(id -u)" -ne 0 ]; then
        command=(sudo "${command[@]}")
    fi
    "${command[@]}" </dev/null
}

# A broken third-party source fails an update as a whole; what we need may well be there all the same.
apt_update() {
    apt update || echo "apt-get update failed; trying with the package lists that are there" >&2
}
