#!/usr/bin/env bash
# Checks and measures Tilewright on a GPU machine, from the package that lies beside this script; builds nothing.
#
#   gpu-check.sh [STEP...]    steps: tests sanitize tune leaderboard bench rows f32 table; without one all of them, in this order
#
# OUT     where logs, rows and tables go (./out)
# PEERS   a Python program that prints rows of other implementations, for the same run (with the step leaderboard)
# SWEEP_PEERS, ROW_PEERS   the same for the steps table and rows; for table, where PyTorch is, it is peers_sweep.py unless you say otherwise
# TUNE_SECONDS   for each problem that the steps rows (8) and f32 (20) tune
#
# Ends with 1 if anything failed. docs/gpu-testing.md says what each step shows.
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

# run NAME SECONDS COMMAND...: the output goes to NAME.log, with a limit of time. Remembers a failure.
run() {
    local name=$1 limit=$2 status
    shift 2
    within "$limit" "$out/$name.log" "$@"
    status=$?
    # What is skipped has shown nothing.
    if [ "$status" = 0 ] && grep -q 'skipped: ' "$out/$name.log"; then
        verdict=skipped
    fi
    [ "$verdict" = ok ] || failures+=("$name: $verdict")
    return "$status"
}

# aside TABLE LABEL NAME SECONDS COMMAND...: as `run`, but in the background, some at a time; a line about it goes to TABLE.
# Most of what a check takes goes into references on the CPU.
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

# Waits for them, and takes their failures over.
gather() {
    local failure
    : >>"$out/aside.txt"
    wait
    while read -r failure; do
        [ -z "$failure" ] || failures+=("$failure")
    done <"$out/aside.txt"
    rm "$out/aside.txt"
}

# Each test in a process of its own: after a fault, the driver refuses the rest of a process.
tests() {
    local binary name names
    run doctor 60 "$bin/tilewright" doctor
    run demo 120 "$bin/tilewright" demo --out "$out/demo"
    for binary in gpu gpu_random; do
        names=$("$bin/$binary" --list 2>"$out/list-$binary.log" | sed -n 's/: test$//p')
        [ -n "$names" ] || failures+=("list-$binary: the binary does not run here")
        for name in $names; do
            aside tests.txt "$binary $name" "test-$binary-${name//::/-}" 400 "$bin/$binary" --exact "$name" --test-threads=1 --nocapture
        done
    done
    gather
}

# Small shapes, whose results the program checks as well. A sanitizer slows kernels down by a factor of hundreds.
sanitize() {
    local tool sanitizer shape dim length dtype name
    sanitizer=$(command -v compute-sanitizer || find /usr/local -maxdepth 3 -name compute-sanitizer 2>/dev/null | sort | tail -n 1)
    if [ -z "$sanitizer" ]; then
        say "sanitize: there is no compute-sanitizer here" >"$out/sanitize.txt"
        return
    fi
    local quick=(--device cuda:0 --warmup-ms 0 --rep-ms 0)
    for tool in memcheck racecheck; do
        local under=("$sanitizer" --tool "$tool" --error-exitcode 9 "$bin/tilewright" bench)
        # The longer ones are no multiple of a tile and have more tiles than a ring has buffers: copies by threads come round again.
        for shape in "64 128 bf16" "64 130 bf16" "128 128 bf16" "128 130 bf16" "80 65 f16" "64 66 f32" "64 322 bf16" "128 322 bf16" \
            "80 333 f16"; do
            read -r dim length dtype <<<"$shape"
            aside sanitize.txt "$tool attention d=$dim length=$length $dtype" "sanitize-$tool-attention-$dim-$length-$dtype" 120 \
                "${under[@]}" attention "${quick[@]}" --heads 2 --seq-len "$length" --head-dim "$dim" --dtype "$dtype"
        done
        # f32: by warps, whole and in parts, and by warpgroups.
        for shape in "66 128" "258 64" "258 128" "66 64 64,32,4,2,wgmma 32,128,8,2,no-ov,wgmma 128,32,8,2,wgmma" \
            "66 80 128,32,8,2,wgmma 16,64,8,2,no-ov,wgmma 64,32,4,2,wgmma"; do
            read -r length dim forward keys queries <<<"$shape"
            name="attention d=$dim length=$length f32 $forward"
            aside sanitize.txt "$tool $name" "sanitize-$tool-${name//[ ,=]/-}" 200 "${under[@]}" attention "${quick[@]}" --heads 1 \
                --seq-len "$length" --head-dim "$dim" --dtype f32 --causal true ${forward:+--fwd-tiles "$forward" --dkdv-tiles "$keys" --dq-tiles "$queries"}
        done
        aside sanitize.txt "$tool attention d=128 length=320 bf16 in parts" "sanitize-$tool-attention-parts" 200 "${under[@]}" attention "${quick[@]}" \
            --heads 1 --seq-len 320 --head-dim 128 --dtype bf16 --causal true --splits 2 --fwd-tiles 64,128,4,2,ws --dkdv-tiles 64,64,4,3,ws --dq-tiles 64,64,4,3,ws
        for name in loops_are_pipelined threads_communicate_through_memory; do
            aside sanitize.txt "$tool $name" "sanitize-$tool-$name" 300 \
                "$sanitizer" --tool "$tool" --error-exitcode 9 "$bin/gpu" --exact "loops::$name" --test-threads=1
        done
        aside sanitize.txt "$tool kernels" "sanitize-$tool-kernels" 400 "${under[@]}" kernels "${quick[@]}" --rows 65 --d 100,1024 --sizes 130
    done
    gather
}

# measure NAME SECONDS DEVICE ARGS...: one benchmark; its rows go with all others.
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

# Finds configurations with an empty cache, and holds the whole of it against the 120 s that it may take; then how long a new
# process needs to its first launch from the cache.
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

# peers NAME PROGRAM ARGS...: rows of other implementations to NAME.jsonl, where there is such a program.
peers() {
    local name=$1
    shift
    [ -n "${1:-}" ] || return 0
    run "$name" 400 python3 "$@"
    grep '^{' "$out/$name.log" >"$out/$name.jsonl"
}

# lead NAME SECONDS PEERS ARGS...: the leaderboard's program; its rows go with all others.
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
    lead one-pass 120 "$out/peers.jsonl" --one-pass
    lead 128-one-pass 120 "$out/peers.jsonl" --one-pass --head-dim 128 --warmup-ms 500 --rep-ms 4000
    lead 128 120 "$out/peers.jsonl" --head-dim 128 --warmup-ms 500 --rep-ms 4000
    lead full 120 "$out/peers.jsonl" --non-causal --warmup-ms 500 --rep-ms 4000
    lead full-128 120 "$out/peers.jsonl" --non-causal --head-dim 128 --warmup-ms 500 --rep-ms 4000
    lead 16x1024 60 "$out/peers.jsonl" --batch 16 --seq-len 1024 --warmup-ms 200 --rep-ms 1000
    lead 4x4096 60 "$out/peers.jsonl" --batch 4 --seq-len 4096 --warmup-ms 200 --rep-ms 1000
}

# Kernels over rows, tuned and then timed, beside others.
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

# f32 on tensor cores: by warps and by warpgroups, as the tuner finds them, then with what was found. The driver takes most of a second
# to load a candidate of attention: fewer seconds leave most of them out. One head has few programs, 64 have many.
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
# A program with models in it wants CUDA's libraries.
if LC_ALL=C ldd "$bin/tilewright" 2>/dev/null | grep -q 'not found'; then
    LD_LIBRARY_PATH=$(libraries)${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
    export LD_LIBRARY_PATH
fi
commit=$(cat "$bin/commit")
export TILEWRIGHT_CACHE=$bin/cache
tables=()
steps=("$@")
[ ${#steps[@]} -gt 0 ] || steps=(tests sanitize tune leaderboard bench rows f32 table)
rm -f "$out/aside.txt" "$out/tests.txt" "$out/sanitize.txt" "$out/tune.txt"
for step in "${steps[@]}"; do
    case $step in
        tests | sanitize | tune | leaderboard | bench | rows | f32 | table) "$step" ;;
        *)
            say "gpu-check: there is no step '$step': the steps are tests, sanitize, tune, leaderboard, bench, rows, f32 and table" >&2
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
    # Progress of the compiler and the like comes first; the table and what failed come last.
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
