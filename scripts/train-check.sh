#!/usr/bin/env bash
# Tests and benchmarks training on a GPU machine, with the programs in package.tar.xz beside this script; builds nothing.
#
#   train-check.sh STEP...    steps on one GPU: smoke curves model profile norm attention-kinds fused
#                             steps on two GPUs: dist dist-tests dist-bench dist-copies dist-sweep dist-sms dist-profile
#                             each takes less than 9 minutes
#
# OUT          folder for results (default ./out): STEP.tar.gz with all logs and files of a step, and summary.txt. Both are updated
#              after each command, so that an interrupted step leaves its results; running.log is the output of the current command
# SIZES        model sizes of the step model (default small,medium,large,xl,2.7B)
# PRECISIONS   GEMM precisions of the step model (default bf16,f32,tf32x3)
# PEERS        Python module with go(size, ctx, prec, attn, comp), which prints a JSON row of PyTorch for the same model (step model)
# PEERS_DIST   program for torchrun that prints JSON rows (step dist-bench)
# LIBRARIES    folders of CUDA's libraries, separated by colons (default: installed toolkits and NVIDIA's Python packages)
#
# The exit code is 1 if anything failed. docs/gpu-testing.md describes the steps.
set -uo pipefail

steps=(smoke curves model profile norm attention-kinds fused dist dist-tests dist-bench dist-copies dist-sweep dist-sms dist-profile)
out=${OUT:-out}
mkdir -p "$out" || exit 1
out=$(cd "$out" && pwd)
here=$(cd "$(dirname "$0")" && pwd)
# shellcheck source=scripts/check-common.sh
source "$here/check-common.sh" || exit 1
failures=()

# noted: copies stdin to the summaries immediately; note WORDS...: the same for one line.
noted() { tee -a "$logs/summary.txt" "$out/summary.txt"; }
note() { printf '%s\n' "$*" | noted; }

# Archives the results of the step so far, without weights: they are large and reproducible from the seed.
pack() {
    tar -C "$work" --exclude='*.safetensors' -czf "$work/packed" "$step" && mv "$work/packed" "$out/$step.tar.gz"
}

# Exits with an error if libraries that the program links are missing. Warns if CUPTI is missing, which only profiles load.
missing() {
    local lacking
    lacking=$(LD_LIBRARY_PATH=$LIBRARIES ldd "$bin/tilewright" 2>&1 | grep -E 'not found|version .* required')
    if [ -n "$lacking" ]; then
        say "train-check: tilewright cannot start: these libraries were not found in $LIBRARIES:" >&2
        say "$lacking" >&2
        say "  help: set LIBRARIES=folder:folder to their folders. Required: libcublas, libcurand, libnvrtc and libcudart of CUDA 13, libnccl.so.2" >&2
        say "  and the driver's libcuda.so.1 (Python packages nvidia-cublas, nvidia-curand, nvidia-cuda-nvrtc, nvidia-cuda-runtime, nvidia-nccl-cu13)" >&2
        exit 1
    fi
    local folders
    IFS=: read -ra folders <<<"$LIBRARIES"
    if ! find "${folders[@]}" -maxdepth 1 -name 'libcupti.so*' 2>/dev/null | grep -q .; then
        say "train-check: libcupti.so was not found in $LIBRARIES: the step profile will fail (Python package nvidia-cuda-cupti)" >&2
    fi
}

# run NAME SECONDS COMMAND...: runs the command with a timeout, writes its output to NAME.log, and records a failure.
run() {
    local name=$1 limit=$2 status
    shift 2
    within "$limit" "$out/running.log" "$@"
    status=$?
    mv "$out/running.log" "$logs/$name.log"
    [ "$status" = 0 ] || failures+=("$name: $verdict")
    note "$(printf '%-44s %4d s  %s' "$name" "$took" "$verdict")"
    pack
    return "$status"
}

# ours NAME SECONDS ARGS...: runs tilewright with CUDA's libraries.
ours() {
    local name=$1 limit=$2
    shift 2
    run "$name" "$limit" env "LD_LIBRARY_PATH=$LIBRARIES" "$bin/tilewright" "$@"
}

# Truncates each line to 400 characters. Not `cut -c`, which counts bytes: box-drawing characters of tables have three.
short() { PYTHONUTF8=1 python3 -c 'import sys; [print(line.rstrip("\n")[:400]) for line in sys.stdin]'; }

# show NAME LINES: copies the last lines of a log to the summary.
show() { tail -n "$2" "$logs/$1.log" | short | noted; }

# check NAME SECONDS ARGS...: runs train_tables.py, and copies its tables and checks to the summary.
check() {
    local name=$1 limit=$2
    shift 2
    run "$name" "$limit" python3 "$bin/train_tables.py" "$@"
    show "$name" 60
}

smoke() {
    ours doctor 60 doctor
    show doctor 14
    local kind
    for kind in naive tiled flash; do
        ours "train-$kind" 90 train --device cuda:0 --steps 20 --attention "$kind" --evaluate-sequences 4 --out "$logs/train-$kind"
        show "train-$kind" 6
    done
    ours train-bf16 90 train --device cuda:0 --steps 20 --precision bf16 --evaluate-sequences 4 --out "$logs/train-bf16"
    show train-bf16 6
    ours model-small 120 bench model --device cuda:0 --sizes small --contexts 128 --precisions bf16,f32 --cuda-graph off,on --commit "$commit" \
        --json "$logs/model-small.json"
    check model-table 60 model "$logs/model-small.json"
}

# Loss curves: three kinds of attention in f32 and bf16 from the same initial state, other seeds in bf16, tf32x3, and PyTorch from the same
# initial state.
curves() {
    local kind seed common=(train --device cuda:0 --steps 100 --evaluate-sequences 4 --save-every 0)
    for kind in naive tiled flash; do
        ours "f32-$kind" 90 "${common[@]}" --precision f32 --attention "$kind" --out "$logs/f32-$kind"
        ours "bf16-$kind" 90 "${common[@]}" --precision bf16 --attention "$kind" --out "$logs/bf16-$kind"
    done
    for seed in 1 2 3; do
        ours "bf16-seed-$seed" 60 "${common[@]}" --precision bf16 --seed "$seed" --out "$logs/bf16-seed-$seed"
    done
    ours tf32x3-flash 90 "${common[@]}" --precision tf32x3 --out "$logs/tf32x3-flash"
    ours export 60 train --device cuda:0 --steps 50 --evaluate-sequences 4 --save-every 0 --precision f32 \
        --out "$logs/export" --export "$logs/start"
    check curves-table 30 curves "$logs"
    run reference-f32 120 python3 "$bin/reference_model.py" "$logs/start" "$logs/export/log.jsonl" --device cuda \
        --tolerance 1e-3 --out "$logs/reference-f32.json"
    show reference-f32 3
    # Weights and batches are large, and reproducible from the seed.
    rm -rf "$logs/start"
}

model() {
    local size sizes=${SIZES:-small,medium,large,xl,2.7B} files=() began=$SECONDS
    for size in ${sizes//,/ }; do
        # The JSON file is written after each row, so it is valid even if the command timed out.
        ours "model-$size" 120 bench model --device cuda:0 --sizes "$size" --contexts 128,1024 --batches 4 \
            --precisions "${PRECISIONS:-bf16,f32,tf32x3}" --cuda-graph off,on --seconds 2 --commit "$commit" --json "$logs/model-$size.json"
        [ ! -e "$logs/model-$size.json" ] || files+=("$logs/model-$size.json")
    done
    check model-table-ours 30 model "${files[@]}"
    local left=$((510 - (SECONDS - began)))
    if [ -n "${PEERS:-}" ] && [ "$left" -gt 30 ]; then
        # Slowest last: a timeout drops only those.
        run model-peers "$left" python3 -u -c '
import sys
sys.path.insert(0, sys.argv[1])
peers = __import__(sys.argv[2])
for prec, ctx in (("bf16", 128), ("bf16", 1024), ("fp32", 128), ("fp32", 1024)):
    for size in sys.argv[3].lower().split(","):
        for comp in ("graphs", True, False):
            peers.go(size, ctx, prec, "sdpa", comp)
' "$(dirname "$PEERS")" "$(basename "$PEERS" .py)" "$sizes"
        grep '^{' "$logs/model-peers.log" >"$logs/model-peers.jsonl"
        check model-table 30 model "${files[@]}" "$logs/model-peers.jsonl"
    fi
}

profile() {
    ours profile-xl 150 profile --device cuda:0 --size xl --context 128 --precision bf16 --commit "$commit" --out "$logs/profile-xl"
    ours memory-xl 150 memory --device cuda:0 --size xl --context 128 --precision bf16 --commit "$commit" --out "$logs/memory-xl"
    ours profile-small 60 profile --device cuda:0 --size small --context 512 --attention naive --fusion none --commit "$commit" \
        --out "$logs/profile-small"
    ours memory-2.7B 150 memory --device cuda:0 --size 2.7B --context 128,256,512 --commit "$commit" --out "$logs/memory-2.7B"
    check profile-sums 30 sums "$logs/profile-xl" "$logs/memory-xl" "$logs/profile-small" "$logs/memory-2.7B"
    show profile-xl 50
}

norm() {
    ours norm 240 bench norm --device cuda:0 --rows 50000 --d 1024,2048,4096,8192 --commit "$commit" --out "$logs/norm"
    show norm 30
    ours norm-models 240 bench model --device cuda:0 --sizes small,medium,large --contexts 128 --attentions naive --fusions none,ops \
        --modes forward,train-step --commit "$commit" --json "$logs/norm-models.json"
    show norm-models 40
}

attention-kinds() {
    ours attention-naive-flash 300 bench attention --device cuda:0 --kinds naive,flash --head-dim 16,32,64,128 \
        --seq-lens 256,1024,4096,8192,16384 --runs 30 --commit "$commit" --out "$logs/attention-naive-flash"
    show attention-naive-flash 50
    ours attention-tiled 180 bench attention --device cuda:0 --kinds tiled --head-dim 16,64,128 --seq-lens 256,1024,4096 --runs 5 \
        --commit "$commit" --out "$logs/attention-tiled"
    show attention-tiled 20
}

fused() {
    ours fused-attention 200 bench fused --device cuda:0 --subjects attention --runs 30 --commit "$commit" --out "$logs/fused-attention"
    show fused-attention 34
    ours fused-model 300 bench fused --device cuda:0 --subjects model --sizes small,medium,large,xl,2.7B --steps 5 --warmup 3 \
        --commit "$commit" --out "$logs/fused-model"
    show fused-model 30
}

# ranks NAME SECONDS ARGS...: runs tilewright with two ranks, one per GPU.
ranks() {
    local name=$1 limit=$2
    shift 2
    ours "$name" "$limit" launch --nproc 2 -- tilewright "$@"
}

dist() {
    # A large ε: with AdamW's default, a weight whose gradient is rounding noise gets an update of noise. No clipping: parameter updates
    # then overlap the communication of gradients.
    local form common=(train --steps 20 --batch 16 --eps 1e-4 --clip 0 --evaluate-sequences 4 --save-every 0 --precision f32)
    ranks comm 60 bench comm --sizes 0.512,1,10,50,100,500,1000 --commit "$commit" --json "$logs/comm.json"
    show comm 16
    ours alone 60 "${common[@]}" --device cuda:0 --out "$logs/alone"
    for form in naive flat overlap bucketed; do
        ranks "ddp-$form" 60 "${common[@]}" --ddp "$form" --bucket-mb 1 --out "$logs/ddp-$form"
    done
    ranks shard-broadcast 60 "${common[@]}" --shard broadcast --out "$logs/shard-broadcast"
    ranks shard-zero1 60 "${common[@]}" --shard zero1 --out "$logs/shard-zero1"
    check dist-weights 60 weights "$logs/alone" "$logs"/ddp-*/ "$logs"/shard-*/
}

# Collectives, training and failing ranks on two GPUs, over NCCL.
dist-tests() {
    run dist-tests 400 env "LD_LIBRARY_PATH=$LIBRARIES" "TILEWRIGHT_TEST_PROGRAM=$bin/tilewright" "$bin/rank-tests" nccl:: --test-threads 1 --nocapture
    show dist-tests 40
    if grep -q 'skipped: .* needs 2 GPUs' "$logs/dist-tests.log"; then
        failures+=("dist-tests: skipped: needs two GPUs")
    fi
}

dist-bench() {
    local precision
    for precision in f32 bf16; do
        ranks "ddp-xl-$precision" 150 bench ddp --size xl --precision "$precision" --batch 4 --context 128 --commit "$commit" \
            --json "$logs/ddp-xl-$precision.json"
        show "ddp-xl-$precision" 16
    done
    ranks shard-xl 120 bench shard --size xl --batch 4 --context 128 --commit "$commit" --json "$logs/shard-xl.json"
    show shard-xl 12
    check dist-table 30 dist "$logs"/ddp-xl-*.json "$logs/shard-xl.json"
    if [ -n "${PEERS_DIST:-}" ]; then
        run dist-peers 300 python3 -m torch.distributed.run --nproc_per_node=2 "$PEERS_DIST"
        grep '^{' "$logs/dist-peers.log" | noted
    fi
}

# Correctness of collectives over copy engines; then their time, compared with NCCL and with no communication. If the tests fail,
# nothing is measured.
dist-copies() {
    local precision
    run copies-tests 120 env "LD_LIBRARY_PATH=$LIBRARIES" "TILEWRIGHT_TEST_PROGRAM=$bin/tilewright" "$bin/rank-tests" nccl::copy_engines_run nccl::training_on_gpus --nocapture || return
    if grep -q 'skipped: .* needs 2 GPUs' "$logs/copies-tests.log"; then
        failures+=("copies-tests: skipped: needs two GPUs")
    fi
    ranks copies-comm 40 bench comm --copy-engines --collective all_reduce,reduce_scatter,all_gather --sizes 1,25,100,1000 --commit "$commit" \
        --json "$logs/copies-comm.json"
    show copies-comm 18
    for precision in f32 bf16; do
        ranks "copies-$precision" 50 bench ddp --size xl --batch 4 --context 128 --precision "$precision" --comm-dtypes "$precision" --form bucketed \
            --buckets 25,100,1000 --copy-engines off,on --warmup 3 --repeat 6 --commit "$commit" --json "$logs/copies-$precision.json"
        show "copies-$precision" 12
    done
    check copies-table 30 dist "$logs"/copies-{f32,bf16}.json
}

# Number of SMs for NCCL (its CTAs), bucket size, and the speedup from bf16 as communication dtype.
dist-sweep() {
    local ctas xl=(--size xl --batch 4 --context 128 --warmup 4 --repeat 6 --commit "$commit")
    local common=("${xl[@]}" --form bucketed)
    ranks sweep-f32 150 bench ddp "${common[@]}" --precision f32 --buckets 100,300 --ctas 0,4,8,12,16,24 --json "$logs/sweep-f32.json"
    ranks sweep-bf16 150 bench ddp "${common[@]}" --precision bf16 --buckets 100,300 --ctas 0,8,16 --comm-dtypes f32,bf16 \
        --json "$logs/sweep-bf16.json"
    # NCCL's kernels with thread block clusters, NCCL's default on Hopper.
    NCCL_CGA_CLUSTER_SIZE=4 ranks sweep-f32-clusters 60 bench ddp "${common[@]}" --precision f32 --buckets 300 --ctas 8,16 \
        --json "$logs/sweep-f32-clusters.json"
    NCCL_CGA_CLUSTER_SIZE=4 ranks sweep-bf16-clusters 60 bench ddp "${common[@]}" --precision bf16 --buckets 300 --ctas 8,16 \
        --comm-dtypes f32,bf16 --json "$logs/sweep-bf16-clusters.json"
    for ctas in 0 8; do
        ranks "shard-$ctas" 60 bench shard "${xl[@]}" --nccl-ctas "$ctas" --json "$logs/shard-$ctas.json"
    done
    check sweep-table 30 dist "$logs"/sweep-*.json "$logs"/shard-*.json
}

# Speedup from GEMMs that reserve SMs for NCCL; and from NCCL blocks with half the threads, so that a GEMM block fits on the same SM.
dist-sms() {
    local xl=(--size xl --batch 4 --context 128 --commit "$commit")
    local common=("${xl[@]}" --form bucketed --buckets 300 --warmup 4 --repeat 6)
    ranks sms-f32 60 bench ddp "${common[@]}" --precision f32 --ctas 8,12,16 --reserve-sms 0,auto,32 --json "$logs/sms-f32.json"
    ranks sms-bf16 40 bench ddp "${common[@]}" --precision bf16 --comm-dtypes bf16 --ctas 16,24 --reserve-sms 0,auto --json "$logs/sms-bf16.json"
    NCCL_NTHREADS=256 ranks sms-f32-threads 40 bench ddp "${common[@]}" --precision f32 --ctas 16,24 --reserve-sms 0,8 --json "$logs/sms-f32-threads.json"
    # Logs the stream priorities and the kernels of GEMMs; the trace shows their thread blocks.
    TILEWRIGHT_LOG=tilewright_harness::ops=debug,tilewright_harness::dist=debug ranks sms-profile 40 profile "${xl[@]}" --ddp bucketed \
        --bucket-mb 300 --nccl-ctas 12 --steps 3 --out "$logs/sms-profile"
    grep -m 2 'priorities:' "$logs/sms-profile.log" | short | noted
    grep -A 12 'Overlap of communication and compute' "$logs/sms-profile.log" | short | noted
    check sms-table 30 dist "$logs"/sms-*.json
}

# Overlap of communication with compute, from traces: none for naive and flat, nearly all for bucketed.
dist-profile() {
    local form
    for form in naive flat bucketed; do
        ranks "profile-xl-$form" 120 profile --size xl --batch 4 --context 128 --ddp "$form" --steps 3 --commit "$commit" \
            --out "$logs/profile-xl-$form"
        grep -A 12 'Overlap of communication and compute' "$logs/profile-xl-$form.log" | short | noted
    done
}

[ $# -gt 0 ] || { say "train-check: missing STEP: expected one or more of ${steps[*]}" >&2 && exit 2; }
for step in "$@"; do
    case " ${steps[*]} " in
        *" $step "*) ;;
        *) say "train-check: unknown step '$step': expected one or more of ${steps[*]}" >&2 && exit 2 ;;
    esac
done
unpack tilewright-train-check
commit=$(cat "$bin/commit")
LIBRARIES=${LIBRARIES:-$(libraries)}${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
missing
export TILEWRIGHT_CACHE=$bin/cache
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
say "commit $commit, $(date -u +%Y-%m-%d)" | tee -a "$out/summary.txt"
for step in "$@"; do
    logs=$work/$step
    before=${#failures[@]}
    mkdir -p "$logs"
    note "== $step"
    "$step"
    for failure in "${failures[@]:before}"; do
        note "-- $failure"
        show "${failure%%:*}" 12
    done
    pack
done
say "${#failures[@]} failures; logs are in $out/STEP.tar.gz"
[ ${#failures[@]} -eq 0 ]
