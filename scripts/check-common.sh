# Functions shared by gpu-check.sh and train-check.sh, which source this file from their folder, `here`.
# shellcheck shell=bash

say() { printf '%s\n' "$*"; }

# unpack NAME: unpacks the package into the temporary folder NAME and sets `bin` to its path. Does nothing if this package is
# already there.
unpack() {
    local stamp
    stamp=$(cksum <"$here/package.tar.xz") || exit 1
    bin=${TMPDIR:-/tmp}/$1
    if [ "$(cat "$bin/stamp" 2>/dev/null)" = "$stamp" ]; then
        return
    fi
    rm -rf "$bin"
    mkdir -p "$bin"
    if command -v xz >/dev/null; then
        xz -dc "$here/package.tar.xz" | tar -C "$bin" -xf - || exit 1
    else
        python3 -c 'import sys, tarfile; tarfile.open(sys.argv[1]).extractall(sys.argv[2])' \
            "$here/package.tar.xz" "$bin" || exit 1
    fi
    printf '%s' "$stamp" >"$bin/stamp"
}

# Prints the folders of CUDA's libraries, separated by colons: those of installed toolkits, then of NVIDIA's Python packages.
libraries() {
    local folder found=()
    for folder in "${CUDA_HOME:-/usr/local/cuda}"/{targets/x86_64-linux/lib,lib64,extras/CUPTI/lib64} \
        /usr/local/cuda*/{targets/x86_64-linux/lib,lib64,extras/CUPTI/lib64}; do
        [ ! -d "$folder" ] || found+=("$folder")
    done
    while IFS= read -r folder; do
        [ -z "$folder" ] || found+=("$folder")
    done < <(python3 -c '
import glob, site, sysconfig
places = {sysconfig.get_path("purelib"), site.getusersitepackages(), *site.getsitepackages()}
print("\n".join(sorted({f for place in places for f in glob.glob(place + "/nvidia/*/lib")})))' 2>/dev/null)
    (
        IFS=:
        printf '%s' "${found[*]}"
    )
}

# within SECONDS LOG COMMAND...: runs the command with a timeout and writes its output to LOG. Sets `verdict` and `took` (seconds);
# returns the command's exit status.
within() {
    local limit=$1 log=$2 start=$SECONDS status
    shift 2
    timeout -k 10 "$limit" "$@" >"$log" 2>&1
    status=$?
    took=$((SECONDS - start))
    case $status in
        0) verdict=ok ;;
        124 | 137) verdict="stopped after $limit s" ;;
        *) verdict="FAILED ($status)" ;;
    esac
    return "$status"
}
