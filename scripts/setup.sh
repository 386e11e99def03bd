#!/usr/bin/env bash
# Makes this machine able to build Tilewright: finds out what is missing and installs it with apt-get.
#
# Each requirement is probed by using it (asking llvm-config, linking a program), so that packages from any source
# count, and a machine that has everything is left alone within a fraction of a second.
#
# LLVM_SYS_221_PREFIX names an LLVM 22 install of your own; this script then installs no LLVM. See docs/building.md.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=apt.sh
. "$(dirname "$0")/apt.sh"

system_prefix=/usr/lib/llvm-22
llvm_prefix=${LLVM_SYS_221_PREFIX:-$system_prefix}

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# die WORDS...: one paragraph for the person at the terminal, then the end.
die() {
    printf 'setup: %s\n' "$*" | fold -s -w 110 | sed 's/ *$//' >&2
    exit 1
}

# llvm_config ARGS...: asks the llvm-config of the prefix, under either of the names that installs give it.
llvm_config() {
    local name
    for name in llvm-config-22 llvm-config; do
        if [ -x "$llvm_prefix/bin/$name" ]; then
            "$llvm_prefix/bin/$name" "$@"
            return
        fi
    done
    return 1
}

# LLVM 22 with headers and all its static libraries; otherwise `llvm_lacks` says what it found wrong. Debian's
# llvm-config lists Polly's libraries even where their package is not installed: so each file is looked for.
has_llvm() {
    local version archives file
    version=$(llvm_config --version 2>&1) || {
        llvm_lacks="there is no working bin/llvm-config${version:+ ($version)}"
        return 1
    }
    case $version in
        22.*) ;;
        *)
            llvm_lacks="it is LLVM $version"
            return 1
            ;;
    esac
    archives=$(llvm_config --link-static --libfiles 2>&1) || {
        llvm_lacks="$archives"
        return 1
    }
    for file in "$(llvm_config --includedir)/llvm-c/Core.h" $archives; do
        [ -e "$file" ] || {
            llvm_lacks="$file is missing"
            return 1
        }
    done
}

# can_link FLAGS...: a C compiler is there, and finds the libraries that the flags name.
can_link() {
    printf 'int main(void) { return 0; }\n' >"$scratch/main.c"
    cc "$scratch/main.c" -o "$scratch/main" "$@" >/dev/null 2>&1
}

# Fills `missing` (for people) and `packages` (for apt-get) with what the probes do not find.
probe() {
    missing=()
    packages=()
    if ! can_link -lstdc++; then
        missing+=("a C and C++ compiler")
        packages+=(gcc g++ libc6-dev)
    fi
    if ! can_link -lz -lzstd -lffi; then
        missing+=("the development files of zlib, zstd and libffi")
        packages+=(zlib1g-dev libzstd-dev libffi-dev)
    fi
    if ! command -v xz >/dev/null; then
        missing+=("xz")
        packages+=(xz-utils)
    fi
    if ! has_llvm; then
        missing+=("LLVM 22")
        packages+=(llvm-22-dev libpolly-22-dev)
    fi
}

# join ITEMS...: the items with commas between them.
join() {
    local list
    printf -v list '%s, ' "$@"
    printf '%s' "${list%, }"
}

in_package_sources() {
    apt-cache show "$1" >/dev/null 2>&1
}

explain_llvm_repository() {
    local codename
    # shellcheck disable=SC1091 # a file of the system
    codename=$(. /etc/os-release && printf '%s' "${VERSION_CODENAME:-CODENAME}")
    cat >&2 <<MESSAGE
setup: LLVM 22 is missing, and the package sources of this system do not have it. The LLVM project packages it
for Debian and Ubuntu: add its repository with these commands (as root), then run this again.

    apt-get install -y ca-certificates curl
    curl -fsSL -o /etc/apt/keyrings/apt.llvm.org.asc https://apt.llvm.org/llvm-snapshot.gpg.key
    echo "deb [signed-by=/etc/apt/keyrings/apt.llvm.org.asc] https://apt.llvm.org/$codename/ llvm-toolchain-$codename-22 main" \\
        > /etc/apt/sources.list.d/llvm-22.list

Or set LLVM_SYS_221_PREFIX to an LLVM 22 that you have (docs/building.md).
MESSAGE
    exit 1
}

install_packages() {
    command -v apt-get >/dev/null || die \
        "this machine lacks $(join "${missing[@]}"), and has no apt-get to install them with. Install them with" \
        "your own package manager, set LLVM_SYS_221_PREFIX to where LLVM 22 went, and run this again. Debian calls" \
        "the packages ${packages[*]}; docs/building.md says what is needed of each."
    can_become_root || die \
        "this machine lacks $(join "${missing[@]}"). Installing takes root, and you are neither root nor able to" \
        "use sudo here. Ask an administrator to run 'apt-get install ${packages[*]}'. LLVM 22 may also lie in a" \
        "folder of your own: set LLVM_SYS_221_PREFIX to it (docs/building.md)."

    echo "setup: installing $(join "${missing[@]}") (${packages[*]})"
    apt_update
    if ! has_llvm && ! { in_package_sources llvm-22-dev && in_package_sources libpolly-22-dev; }; then
        explain_llvm_repository
    fi
    apt install --no-install-recommends "${packages[@]}" || die \
        "apt-get could not install ${packages[*]}; its own messages above say why."
}

command -v cargo >/dev/null || die \
    "there is no cargo on PATH. Install Rust 1.95 or later (https://rustup.rs), then run this again."

if [ "$llvm_prefix" != "$system_prefix" ] && ! has_llvm; then
    die "LLVM_SYS_221_PREFIX is $llvm_prefix, and that is not a complete LLVM 22 with headers and static libraries:" \
        "$llvm_lacks. Correct the variable, or unset it to use the packages of this system."
fi
probe
if [ ${#missing[@]} -gt 0 ]; then
    install_packages
    probe
    [ ${#missing[@]} -eq 0 ] || die "installed everything, and still do not find $(join "${missing[@]}")."
fi

# Which libraries LLVM itself wants depends on how it was built, so only it can say.
read -ra llvm_libs <<<"$(llvm_config --link-static --system-libs | tr '\n' ' ')"
can_link "${llvm_libs[@]}" || die \
    "LLVM in $llvm_prefix wants to be linked with '${llvm_libs[*]}', and not all of these are installed." \
    "Install their development packages (in Debian: libxml2-dev, libz3-dev, libzstd-dev, zlib1g-dev)."
