#!/usr/bin/env bash
# Runs a command repeatedly, to find intermittent failures:
#
#   scripts/repeat.sh 20 cargo test -p tilewright-harness --test dist
#
# Prints the duration of each run. Stops at the first failure and prints its output.
set -euo pipefail

times=${1:?missing TIMES; usage: scripts/repeat.sh TIMES COMMAND…}
shift
[ "$#" -gt 0 ] || { echo "repeat: missing COMMAND; usage: scripts/repeat.sh TIMES COMMAND…" >&2; exit 2; }
[[ $times =~ ^[1-9][0-9]*$ ]] || { echo "repeat: expected a positive integer for TIMES, found \`$times\`" >&2; exit 2; }

output=$(mktemp)
trap 'rm -f "$output"' EXIT
for ((run = 1; run <= times; run++)); do
    began=$SECONDS
    if "$@" >"$output" 2>&1; then
        echo "repeat: run $run of $times passed in $((SECONDS - began)) s"
    else
        code=$?
        cat "$output"
        echo "repeat: run $run of $times failed with exit code $code after $((SECONDS - began)) s: $*" >&2
        exit 1
    fi
done
