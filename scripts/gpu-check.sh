#!/usr/bin/env bash
# Tests and benchmarks Tilewright on a GPU machine, with the programs in package.tar.xz beside this script; builds nothing.
#
#   gpu-check.sh [STEP...]    steps: tests sanitize tune leaderboard bench rows f32 table (default: all, in this order)
#
# OUT            folder for logs, rows and tables (default ./out)
# PEERS          Python program that measures other implementations and prints JSON rows, for the step leaderboard
# SWEEP_PEERS    the same for the step table (default: peers_sweep.py if PyTorch and Triton are installed)
# ROW_PEERS      the same for the step rows
# TUNE_SECONDS   tuning time per problem in the steps rows (default 8) and f32 (default 20)
#
# The exit code is 1 if anything failed. docs/gpu-testing.md describes the steps.
set -uo pipefail

out=${OUT:-out}
mkdir -p "$out" || exit 1
out=$(cd "$out" && pwd)
here=$(cd "$(dirname "$0")" && pwd)
# shellcheck source=scripts/check-common.sh
source "$here/check-common.sh" || exit 1
rows=$out/rows.jsonl
failures=()
at_once=$(($(nproc) / 2 + 1))

# run NAME SECONDS COMMAND...: runs the command with a timeout, writes its output to NAME.log, and records a failure.
run() {
    local name=$1 limit=$2 status
    shift 2
    within "$limit" "$out/$name.log" "$@"
    status=$?
    # A skipped test counts as a failure: it tested nothing.
    if [ "$status" = 0 ] && grep -q 'skipped: ' "$out/$name.log"; then
        verdict=skipped
    fi
    [ "$verdict" = ok ] || failures+=("$name: $verdict")
    return "$status"
}

# aside TABLE LABEL NAME SECONDS COMMAND...: like `run`, but in the background, with at most `at_once` commands in parallel; appends a
# line to TABLE. Commands run in parallel because most of their time is spent in references on the CPU.
aside() {
    local table=$1 label=$2
    shift 2
    while [ "$(jobs -rp | wc -l)" -ge "$at_once" ]; do wait -n; done
    (
        failures=()
        run "$@"
        printf '%-64s %4d s  %s\n' "$label" "$took" "$verdict" >>"$out/$table"
        printf '%s\n' "${failures[@]}" >>"$out/aside.txt"
    ) &
}

# Waits for the commands started by `aside`, and records their failures.
gather() {
    local failure
    : >>"$out/aside.txt"
    wait
    while read -r failure; do
        [ -z "$failure" ] || failures+=("$failure")
    done <"$out/aside.txt"
    rm "$out/aside.txt"
}

# Runs each test in a separate process: after a fault, the driver rejects all further calls of the process.
tests() {
    local binary name names
    run doctor 60 "$bin/tilewright" doctor
    run demo 120 "$bin/tilewright" demo --out "$out/demo"
    # Snapshots are compared where the sources are.
    export TILEWRIGHT_TEST_CASES=$bin/test-cases INSTA_FORCE_PASS=1
    while read -r binary; do
        names=$("$bin/$binary" --list 2>"$out/list-$binary.log" | sed -n 's/: test$//p')
        [ -n "$names" ] || failures+=("list-$binary: the binary does not run here")
        for name in $names; do
            aside tests.txt "$binary $name" "test-$binary-${name//::/-}" 400 "$bin/$binary" --exact "$name" --test-threads=1 --nocapture
        done
    done <"$bin/tests"
    gather
}

# Small shapes, because compute-sanitizer slows kernels down by a factor of hundreds. The program also checks the results.
sanitize() {
    local tool sanitizer shape dim length dtype name
    sanitizer=$(command -v compute-sanitizer || find /usr/local -maxdepth 3 -name compute-sanitizer 2>/dev/null | sort | tail -n 1)
    if [ -z "$sanitizer" ]; then
        say "sanitize: not run: compute-sanitizer was not found on PATH or in /usr/local" >"$out/sanitize.txt"
        return
    fi
    local quick=(--device cuda:0 --warmup-ms 0 --rep-ms 0)
    for tool in memcheck racecheck; do
        local under=("$sanitizer" --tool "$tool" --error-exitcode 9 "$bin/tilewright" bench)
        # The longer ones are not multiples of a tile and have more tiles than pipeline stages: cp.async copies reuse the buffers.
        for shape in "64 128 bf16" "64 130 bf16" "128 128 bf16" "128 130 bf16" "80 65 f16" "64 66 f32" "64 322 bf16" "128 322 bf16" \
            "80 333 f16"; do
            read -r dim length dtype <<<"$shape"
            aside sanitize.txt "$tool attention d=$dim length=$length $dtype" "sanitize-$tool-attention-$dim-$length-$dtype" 120 \
                "${under[@]}" attention "${quick[@]}" --heads 2 --seq-len "$length" --head-dim "$dim" --dtype "$dtype"
        done
        # One pass whose warpgroups exchange P and dS.
        for shape in "192 130" "256 322"; do
            read -r dim length <<<"$shape"
            aside sanitize.txt "$tool attention d=$dim length=$length bf16 one pass" "sanitize-$tool-attention-one-pass-$dim-$length" 200 \
                "${under[@]}" attention "${quick[@]}" --heads 2 --seq-len "$length" --head-dim "$dim" --one-pass --dkdv-tiles 64,64,8,2,ws
        done
        # f32: mma.sync, unsplit (66 rows) and with split-KV and split-Q (258 rows); wgmma.
        for shape in "66 128" "258 64" "258 128" "66 64 64,32,4,2,wgmma 32,128,8,2,no-ov,wgmma 128,32,8,2,wgmma" \
            "66 80 128,32,8,2,wgmma 16,64,8,2,no-ov,wgmma 64,32,4,2,wgmma"; do
            read -r length dim forward keys queries <<<"$shape"
            name="attention d=$dim length=$length f32 $forward"
            aside sanitize.txt "$tool $name" "sanitize-$tool-${name//[ ,=]/-}" 200 "${under[@]}" attention "${quick[@]}" --heads 1 \
                --seq-len "$length" --head-dim "$dim" --dtype f32 --causal true ${forward:+--fwd-tiles "$forward" --dkdv-tiles "$keys" --dq-tiles "$queries"}
        done
        aside sanitize.txt "$tool attention d=128 length=320 bf16 split-KV" "sanitize-$tool-attention-parts" 200 "${under[@]}" attention "${quick[@]}" \
            --heads 1 --seq-len 320 --head-dim 128 --dtype bf16 --causal true --splits 2 --fwd-tiles 64,128,4,2,ws --dkdv-tiles 64,64,4,3,ws --dq-tiles 64,64,4,3,ws
        for name in loops::loops_are_pipelined loops::threads_communicate_through_memory; do
            aside sanitize.txt "$tool $name" "sanitize-$tool-${name#loops::}" 300 \
                "$sanitizer" --tool "$tool" --error-exitcode 9 "$bin/gpu" --exact "$name" --test-threads=1
        done
        aside sanitize.txt "$tool kernels" "sanitize-$tool-kernels" 400 "${under[@]}" kernels "${quick[@]}" --rows 65 --d 100,1024 --sizes 130
    done
    gather
}

# measure NAME SECONDS DEVICE ARGS...: runs one benchmark; its rows are appended to rows.jsonl.
measure() {
    local name=$1 limit=$2 device=$3
    shift 3
    run "bench-$name" "$limit" "$bin/tilewright" bench "$@" --device "$device" --record "$rows" --commit "$commit"
    tables+=("$out/bench-$name.log")
}

bench() {
    measure copy 60 cuda:0 copy
    measure launch 60 cuda:0 launch
    measure compile 60 cuda:0 compile
    local dim
    for dim in 64 128; do
        measure "attention-$dim" 120 cuda:0 attention --head-dim "$dim"
    done
    measure attention-1024 60 cuda:0 attention --head-dim 64 --causal true --batch 16 --seq-len 1024
    measure attention-4096 60 cuda:0 attention --head-dim 64 --causal true --batch 4 --seq-len 4096
    measure kernels 400 cuda:0 kernels --warmup-ms 20 --rep-ms 100
    measure attention-cpu 60 cpu attention
    measure kernels-cpu 120 cpu kernels --warmup-ms 5 --rep-ms 20
}

# Tunes FlashAttention-2 from an empty cache, for comparison with the limit of 120 s; then further attention and GEMM shapes.
tune() {
    rm -rf "$TILEWRIGHT_CACHE"
    local start=$SECONDS
    run tune 240 "$bin/tilewright" tune attention --device cuda:0 --head-dim 64 --causal true --budget 38 \
        --export "$out/tuned.json" --json "$out/tune.json"
    say "tune, FlashAttention-2 with d = 64 from an empty cache: $((SECONDS - start)) s" >"$out/tune.txt"
    run tune-more 900 "$bin/tilewright" tune attention --device cuda:0 --head-dim 64,128 --causal true,false --seq-len 1024,4096,16384 --budget 20 \
        --export "$out/tuned.json" --json "$out/tune-more.json"
    run tune-matmul 300 "$bin/tilewright" tune matmul --device cuda:0 --size 4096x4096x4096,8192x8192x8192 --budget 60 --export "$out/tuned.json"
    tables+=("$out/tune.log" "$out/tune-more.log" "$out/tune-matmul.log")
}

# peers NAME [PROGRAM ARGS...]: runs the Python program that measures other implementations, and writes its rows to NAME.jsonl. Does
# nothing without a program.
peers() {
    local name=$1
    shift
    [ -n "${1:-}" ] || return 0
    run "$name" 400 python3 "$@"
    grep '^{' "$out/$name.log" >"$out/$name.jsonl"
}

# lead NAME SECONDS PEERS ARGS...: runs `leaderboard`, compared with the rows in the file PEERS if there are any; its rows are appended
# to rows.jsonl.
lead() {
    local name=$1 limit=$2 file=$3 compare=()
    shift 3
    [ ! -s "$file" ] || compare=(--compare "$file")
    run "leaderboard-$name" "$limit" "$bin/leaderboard" --device cuda:0 --record "$rows" --commit "$commit" \
        --out "$out/leaderboard-$name" "${compare[@]}" "$@"
    tables+=("$out/leaderboard-$name.log")
}

leaderboard() {
    peers peers ${PEERS:+"$PEERS" main}
    lead default 120 "$out/peers.jsonl"
    lead deterministic 120 "$out/peers.jsonl" --deterministic
    lead 128-deterministic 120 "$out/peers.jsonl" --deterministic --head-dim 128 --warmup-ms 500 --rep-ms 4000
    lead 128 120 "$out/peers.jsonl" --head-dim 128 --warmup-ms 500 --rep-ms 4000
    lead full 120 "$out/peers.jsonl" --non-causal --warmup-ms 500 --rep-ms 4000
    lead full-128 120 "$out/peers.jsonl" --non-causal --head-dim 128 --warmup-ms 500 --rep-ms 4000
    lead 16x1024 60 "$out/peers.jsonl" --batch 16 --seq-len 1024 --warmup-ms 200 --rep-ms 1000
    lead 4x4096 60 "$out/peers.jsonl" --batch 4 --seq-len 4096 --warmup-ms 200 --rep-ms 1000
}

# Row-wise kernels: tuned, then timed, with other implementations for comparison.
rows() {
    local kernel
    for kernel in rms_norm_bwd rms_norm_fwd layer_norm_bwd layer_norm_fwd weighted_sum_bwd weighted_sum_fwd softmax_rows; do
        run "tune-$kernel" 100 "$bin/tilewright" tune "$kernel" --device cuda:0 --dtype f32,bf16 --d 1024,2048,4096,8192 \
            --budget "${TUNE_SECONDS:-8}" \
            --export "$out/tuned.json"
        tables+=("$out/tune-$kernel.log")
    done
    run tune-cross_entropy_fwd 60 "$bin/tilewright" tune cross_entropy_fwd --device cuda:0 --dtype bf16 --budget 10 --export "$out/tuned.json"
    tables+=("$out/tune-cross_entropy_fwd.log")
    peers row-peers ${ROW_PEERS:+"$ROW_PEERS"}
    measure copy-rows 60 cuda:0 copy
    measure rows 200 cuda:0 kernels --only weighted_sum,softmax,rms_norm,layer_norm,cast,adamw --warmup-ms 20 --rep-ms 80
    measure rows-cross_entropy 60 cuda:0 kernels --only cross_entropy --rows 16384 --d 10000,50257 --warmup-ms 20 --rep-ms 80
    measure rows-wide 60 cuda:0 kernels --only cross_entropy --rows 8192 --d 131072 --warmup-ms 20 --rep-ms 80
}

# f32 on tensor cores: tunes over mma.sync and wgmma configurations, then times the best ones. The driver takes most of a second to load
# one attention candidate, so shorter tuning times leave most candidates out. One head gives a sub-wave grid, 64 heads many programs.
f32() {
    local seconds=${TUNE_SECONDS:-20}
    run tune-f32-matmul 400 "$bin/tilewright" tune matmul --device cuda:0 --dtype f32 --size 4096x4096x4096,512x1600x1600,4096x1600x6400 \
        --column-major none,b,a --budget "$((seconds / 2))" --export "$out/tuned.json"
    run tune-f32-attention 400 "$bin/tilewright" tune attention --device cuda:0 --dtype f32 --heads 64 --seq-len 1024 --head-dim 64,80,128 \
        --budget "$seconds" --export "$out/tuned.json"
    run tune-f32-attention-few 400 "$bin/tilewright" tune attention --device cuda:0 --dtype f32 --heads 1 --seq-len 2048,8192 --head-dim 64,128 \
        --budget "$seconds" --export "$out/tuned.json"
    tables+=("$out/tune-f32-matmul.log" "$out/tune-f32-attention.log" "$out/tune-f32-attention-few.log")
    measure f32-matmul 90 cuda:0 kernels --only matmul --sizes 1024,2048,4096,8192 --warmup-ms 20 --rep-ms 100
    measure f32-attention 60 cuda:0 attention --dtype f32 --heads 1 --seq-len 8192 --head-dim 64,128 --causal true --warmup-ms 20 --rep-ms 100
}

table() {
    local program=${SWEEP_PEERS:-}
    if [ -z "$program" ] && python3 -c 'import torch, triton' 2>/dev/null; then
        program=$here/peers_sweep.py
    fi
    peers sweep-peers ${program:+"$program" sweep}
    lead table 560 "$out/sweep-peers.jsonl" --sweep
}

unpack tilewright-gpu-check
# A program with GPU training is linked to CUDA's libraries.
if LC_ALL=C ldd "$bin/tilewright" 2>/dev/null | grep -q 'not found'; then
    LD_LIBRARY_PATH=$(libraries)${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
    export LD_LIBRARY_PATH
fi
commit=$(cat "$bin/commit")
# The files of snapshots are not in the package: tests compare them elsewhere.
export INSTA_FORCE_PASS=1 INSTA_UPDATE=no
export TILEWRIGHT_CACHE=$bin/cache
tables=()
steps=("$@")
[ ${#steps[@]} -gt 0 ] || steps=(tests sanitize tune leaderboard bench rows f32 table)
rm -f "$out/aside.txt" "$out/tests.txt" "$out/sanitize.txt" "$out/tune.txt"
for step in "${steps[@]}"; do
    case $step in
        tests | sanitize | tune | leaderboard | bench | rows | f32 | table) "$step" ;;
        *)
            say "gpu-check: unknown step '$step': expected tests, sanitize, tune, leaderboard, bench, rows, f32 or table" >&2
            exit 2
            ;;
    esac
done

say "commit $commit, $(date -u +%Y-%m-%d)"
for list in "$out/tests.txt" "$out/sanitize.txt" "$out/tune.txt"; do
    [ ! -e "$list" ] || cat "$list"
done
for table in "${tables[@]}"; do
    say "== $(basename "$table" .log)"
    # A log starts with progress output; its table and its errors are at the end.
    tail -n 60 "$table"
done
for failure in "${failures[@]}"; do
    log=$out/${failure%%:*}.log
    say "-- $failure"
    case ${failure%%:*} in
        bench-* | leaderboard-*) ;;
        *) tail -n 8 "$log" ;;
    esac
done
say "${#failures[@]} failures; logs and rows.jsonl are in $out"
[ ${#failures[@]} -eq 0 ]
