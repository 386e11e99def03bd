#!/usr/bin/env bash
# Tests the published crates as their users get them: packages them, unpacks the packages outside of the repository, and builds and
# runs the programs of tests/packages with them (`with-candle` is only checked, because candle takes longer than the rest). Needs no
# network: other crates are those of Cargo.lock, which are downloaded already.
set -euo pipefail
cd "$(dirname "$0")/.."

target=${CARGO_TARGET_DIR:-$PWD/target}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
export CARGO_NET_OFFLINE=true

die() {
    echo "package-test: $*" >&2
    exit 1
}

# expect TEXT WORDS...: fails unless the text contains each of the words.
expect() {
    local text=$1 word
    shift
    for word in "$@"; do
        [[ $text == *"$word"* ]] || die "expected '$word' in:"$'\n'"$text"
    done
}

mapfile -t crates <scripts/published-crates.txt
version=$(sed -n '/^\[workspace.package\]/,/^\[/s/^version = "\(.*\)"/\1/p' Cargo.toml)
CARGO_TARGET_DIR=$target/packages cargo package --quiet --no-verify --locked --allow-dirty "${crates[@]/#/--package=}" 2>"$scratch/warnings" ||
    die "cargo package failed: $(cat "$scratch/warnings")"

cp -r tests/packages/. "$scratch"
cp Cargo.lock "$scratch"
{
    printf '[workspace]\nmembers = ["with-llvm", "without-llvm", "embedded", "with-candle"]\nresolver = "3"\n\n[profile.dev]\ndebug = false\n\n'
    # Other crates as in the repository's workspace, which has built many of them.
    sed -n '/^\[profile.dev.package."\*"\]/,/^$/p' Cargo.toml
    printf '[profile.dev.package.%s]\nopt-level = 0\n\n' "${crates[@]}"
    printf '[patch.crates-io]\n'
    for crate in "${crates[@]}"; do
        # With the time of now: packages have one date, and cargo would take what it built of an older one.
        tar -xzmf "$target/packages/package/$crate-$version.crate" -C "$scratch"
        echo "$crate = { path = \"$crate-$version\" }"
    done
} >"$scratch/Cargo.toml"
sed -i "s/\"=0.1.0\"/\"=$version\"/" "$scratch"/*/Cargo.toml

cd "$scratch"
export CARGO_TARGET_DIR=$target CARGO_INCREMENTAL=0 COMPILED=$scratch/compiled
mkdir "$COMPILED"

# Where LLVM is missing, the build says what to do.
if message=$(LLVM_SYS_221_PREFIX=$scratch/nowhere cargo build -p tilewright-codegen 2>&1); then
    die "the crates were built with an LLVM that does not exist"
fi
expect "$message" "needs LLVM 22" "apt-get install llvm-22-dev" "set LLVM_SYS_221_PREFIX to" "default-features = false"

export TILEWRIGHT_CACHE=$scratch/cache
# The command line of the program's own kernels. Launches of the program then use the configuration that was measured.
output=$(cargo run --quiet -p with-llvm --bin kernels -- list)
expect "$output" "double" "scale<T: Float>"
output=$(cargo run --quiet -p with-llvm --bin kernels -- tune scale --device cpu --shape x=5000 --shape y=5000 --arg n=5000,a=3 \
    --dtype f32 --grid n/tile --budget 2)
expect "$output" "T=f32,n<=8192" "of 3 candidates"
echo "$output"
output=$(cargo run --quiet -p with-llvm -- "$COMPILED")
expect "$output" "CPU: [2.0, 4.0, 6.0]" "tuned: tile="
echo "$output"
tuned=$(grep '^tuned' <<<"$output")

# Compilation starts from the configuration that was measured.
output=$(cargo run --quiet -p with-llvm --bin kernels -- compile scale --target host --dtype f32 --size n=5000 -o "$scratch/scale" 2>&1)
expect "$output" "scale.o" "manifest.json" "those of the configuration that was measured here: ${tuned#tuned: }"
output=$(cargo run --quiet -p with-llvm --bin kernels -- bench double --device cpu --shape x=1000 --shape y=1000 \
    --grid n_x/tile --arg n=1000 --set tile=64 --against tile=512 --warmup-ms 1 --rep-ms 5)
expect "$output" "tile=64" "tile=512" "GB/s"
echo "$output"

# A program without LLVM embeds what its build script compiles, with the configuration that was measured. It needs no cache.
cargo build --quiet -p embedded
if cargo tree -p embedded --edges normal --prefix none | grep -E '^(inkwell|llvm-sys) '; then
    die "the program with embedded kernels depends on LLVM's bindings"
fi
output=$(TILEWRIGHT_CACHE=off "$CARGO_TARGET_DIR/debug/embedded")
expect "$output" "embedded: [2.0, 4.0, 6.0]" "refused: " "out of bounds" "other constant: " "built without LLVM" \
    "by name: [2.0, 4.0, 6.0]" "embeds no kernel \`treble\`" "$tuned" "assumed: 3" "not assumed: "
echo "$output"

cargo check --quiet -p with-candle

if cargo tree -p without-llvm --prefix none | grep -E '^(inkwell|llvm-sys) '; then
    die "the program without LLVM depends on LLVM's bindings"
fi
output=$(LLVM_SYS_221_PREFIX=$scratch/nowhere cargo run --quiet -p without-llvm)
expect "$output" "simulated GPU: [2.0, 4.0, 6.0]" "precompiled: [2.0, 4.0, 6.0]" "out of bounds: \`x\` has 3 elements" \
    "built without LLVM" "the feature \`llvm\` of the crate \`tilewright\`"
echo "$output"
