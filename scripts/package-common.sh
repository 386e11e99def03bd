# Functions shared by gpu-package.sh and gpu-train.sh, which source this file: build programs, and pack them into one archive.
# shellcheck shell=bash

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
contents=$scratch/contents
mkdir -p "$contents"

# put NAME PATTERN ARGS...: runs cargo with ARGS and adds the stripped executable whose file name matches PATTERN to the package, as
# NAME. Cargo appends a hash of the build configuration to the name of a test binary.
put() {
    local name=$1 pattern=$2 binary
    shift 2
    binary=$(cargo "$@" --release --message-format=json-render-diagnostics |
        sed -n '/"reason":"compiler-artifact"/ s/.*"executable":"\([^"]*\)".*/\1/p' | grep -E "/$pattern\$" | tail -n 1) || {
        echo "$(basename "$0" .sh): expected an executable named '$pattern' in cargo's JSON messages, found none" >&2
        exit 1
    }
    strip -o "$contents/$name" "$binary"
}

# put_gpu_tests [NAME...]: adds the tests that need a GPU, those of NAMEs, which use one where there is one, and the programs of the tests
# of native code.
put_gpu_tests() {
    local name
    for name in gpu gpu_random devices language "$@"; do
        put "$name" "$name-[0-9a-f]+" test -p tilewright-tests --test "$name" --no-run
        echo "$name" >>"$contents/tests"
    done
    mkdir "$contents/test-cases"
    TILEWRIGHT_TEST_CASES=$contents/test-cases cargo test --release --quiet -p tilewright-codegen --lib lower::host >"$scratch/cases.log" ||
        { cat "$scratch/cases.log" >&2; exit 1; }
}

# pack FOLDER WINDOW SCRIPT...: writes the package, with the commit hash in it, and the scripts that use it to FOLDER. The programs share
# most of their code (LLVM): with an LZMA window that spans several programs, it is compressed only once.
pack() {
    local out=$1 window=$2 commit
    shift 2
    commit=$(git rev-parse --short=12 HEAD 2>/dev/null || echo unknown)
    if [ "$commit" != unknown ] && [ -n "$(git status --porcelain --untracked-files=no)" ]; then
        commit=$commit-changed
    fi
    echo "$commit" >"$contents/commit"
    echo "$(basename "$0" .sh): compressing"
    mkdir -p "$out"
    (cd "$contents" && tar -cf "$scratch/package.tar" ./*)
    xz --threads=1 "--lzma2=preset=6,dict=$window" -c "$scratch/package.tar" >"$scratch/package.tar.xz"
    mv "$scratch/package.tar.xz" "$out/package.tar.xz"
    cp "$@" scripts/check-common.sh scripts/peers_sweep.py "$out/"
    echo "$(basename "$0" .sh): wrote package.tar.xz ($(du -h "$out/package.tar.xz" | cut -f1), commit $commit) and the scripts that use it to $out"
}
