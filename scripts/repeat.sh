#!/usr/bin/env bash
# Runs a command again and again, to find what fails now and then:
#
#   scripts/repeat.sh 20 cargo test -p tilewright-harness --test dist
#
# Says how long each run took. Stops at the first that fails, with what it wrote.
set -euo pipefail

times=${1:?how often? scripts/repeat.sh TIMES COMMAND…}
shift
[ "$#" -gt 0 ] || { echo "repeat: which command? scripts/repeat.sh TIMES COMMAND…" >&2; exit 2; }
[[ $times =~ ^[1-9][0-9]*$ ]] || { echo "repeat: \`$times\` is no number of times" >&2; exit 2; }

output=$(mktemp)
trap 'rm -f "$output"' EXIT
for ((run = 1; run <= times; run++)); do
    began=$SECONDS
    if "$@" >"$output" 2>&1; then
        echo "repeat: $run of $times is fine, $((SECONDS - began)) s"
    else
        code=$?
        cat "$output"
        echo "repeat: $run of $times failed with exit code $code after $((SECONDS - began)) s: $*" >&2
        exit 1
    fi
done
