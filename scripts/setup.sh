#!/usr/bin/env bash
# Installs missing build dependencies of Tilewright with apt-get.
#
# Each dependency is probed by use (running llvm-config, linking a program), so that installations from any source count.
# If nothing is missing, the script changes nothing and takes a fraction of a second.
#
# LLVM_SYS_221_PREFIX names an existing LLVM 22 installation; the script then does not install LLVM. See docs/building.md.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=apt.sh
. "$(dirname "$0")/apt.sh"

system_prefix=/usr/lib/llvm-22
llvm_prefix=${LLVM_SYS_221_PREFIX:-$system_prefix}

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# die WORDS...: prints the words to stderr as one wrapped paragraph and exits with 1.
die() {
    printf 'setup: %s\n' "$*" | fold -s -w 110 | sed 's/ *$//' >&2
    exit 1
}

# llvm_config ARGS...: runs the llvm-config of the prefix, under either of its usual names.
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

# The parts of LLVM that codegen/find_llvm.rs links.
llvm_components="irreader passes orcjit nvptx x86 native"

# Succeeds if LLVM 22 is installed with the static libraries; otherwise sets `llvm_lacks` to the reason.
has_llvm() {
    local version archives file
    version=$(llvm_config --version 2>&1) || {
        llvm_lacks="bin/llvm-config is missing or fails${version:+ ($version)}"
        return 1
    }
    case $version in
        22.*) ;;
        *)
            llvm_lacks="its version is $version"
            return 1
            ;;
    esac
    # shellcheck disable=SC2086 # a list of words
    archives=$(llvm_config --link-static --libfiles $llvm_components 2>&1) || {
        llvm_lacks="$archives"
        return 1
    }
    for file in $archives; do
        [ -e "$file" ] || {
            llvm_lacks="$file is missing"
            return 1
        }
    done
}

# can_link FLAGS...: succeeds if a C compiler is installed and finds the libraries named by the flags.
can_link() {
    printf 'int main(void) { return 0; }\n' >"$scratch/main.c"
    cc "$scratch/main.c" -o "$scratch/main" "$@" >/dev/null 2>&1
}

# Sets `missing` (names for messages) and `packages` (names for apt-get) to the dependencies that were not found.
probe() {
    missing=()
    packages=()
    if ! can_link -lstdc++; then
        missing+=("a C and C++ compiler")
        packages+=(gcc g++ libc6-dev)
    fi
    if ! can_link -lz -lzstd; then
        missing+=("the development files of zlib and zstd")
        packages+=(zlib1g-dev libzstd-dev)
    fi
    if ! command -v xz >/dev/null; then
        missing+=("xz")
        packages+=(xz-utils)
    fi
    if ! has_llvm; then
        missing+=("LLVM 22")
        packages+=(llvm-22-dev)
    fi
}

# join ITEMS...: prints the items, separated by commas.
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
    # shellcheck disable=SC1091 # a system file
    codename=$(. /etc/os-release && printf '%s' "${VERSION_CODENAME:-CODENAME}")
    cat >&2 <<MESSAGE
setup: LLVM 22 is not installed, and the configured package sources do not have it. The LLVM project publishes packages
for Debian and Ubuntu: add its repository with these commands (as root), then run this script again.

    apt-get install -y ca-certificates curl
    curl -fsSL -o /etc/apt/keyrings/apt.llvm.org.asc https://apt.llvm.org/llvm-snapshot.gpg.key
    echo "deb [signed-by=/etc/apt/keyrings/apt.llvm.org.asc] https://apt.llvm.org/$codename/ llvm-toolchain-$codename-22 main" \\
        > /etc/apt/sources.list.d/llvm-22.list

Or set LLVM_SYS_221_PREFIX to an existing LLVM 22 installation (docs/building.md).
MESSAGE
    exit 1
}

install_packages() {
    command -v apt-get >/dev/null || die \
        "missing: $(join "${missing[@]}"). apt-get was not found, so they cannot be installed automatically. Install them" \
        "with your package manager, set LLVM_SYS_221_PREFIX to the prefix of LLVM 22, and run this script again. The Debian" \
        "packages are ${packages[*]}; docs/building.md lists the required parts of each."
    can_become_root || die \
        "missing: $(join "${missing[@]}"). Installing requires root, and you are neither root nor able to use sudo." \
        "Ask an administrator to run 'apt-get install ${packages[*]}'. LLVM 22 can also be installed in any folder:" \
        "set LLVM_SYS_221_PREFIX to it (docs/building.md)."

    echo "setup: installing $(join "${missing[@]}") (${packages[*]})"
    apt_update
    if ! has_llvm && ! in_package_sources llvm-22-dev; then
        explain_llvm_repository
    fi
    apt install --no-install-recommends "${packages[@]}" || die \
        "apt-get could not install ${packages[*]}; see its messages above."
}

command -v cargo >/dev/null || die \
    "cargo was not found on PATH. Install Rust 1.95 or later (https://rustup.rs), then run this script again."

if [ "$llvm_prefix" != "$system_prefix" ] && ! has_llvm; then
    die "LLVM_SYS_221_PREFIX is $llvm_prefix, which is not an LLVM 22 with its static libraries:" \
        "$llvm_lacks. Correct the variable, or unset it to use the system's packages."
fi
probe
if [ ${#missing[@]} -gt 0 ]; then
    install_packages
    probe
    [ ${#missing[@]} -eq 0 ] || die "the packages were installed, but these dependencies are still not found: $(join "${missing[@]}")."
fi

# The system libraries that LLVM links depend on how it was built: llvm-config lists them.
read -ra llvm_libs <<<"$(llvm_config --link-static --system-libs | tr '\n' ' ')"
can_link "${llvm_libs[@]}" || die \
    "LLVM in $llvm_prefix must be linked with '${llvm_libs[*]}', and not all of these are installed." \
    "Install their development packages (Debian: libxml2-dev, libz3-dev, libzstd-dev, zlib1g-dev)."
