#!/bin/bash
# Trains one job with several learning rates, one after the other, and prints the last validation of each run.
#
#     jobs/sweep.sh RANKS LEARNING_RATE...
#
# The environment variables JOB and FLAGS set another job and more flags; RUNS is the folder of the runs. An existing
# run resumes from its newest checkpoint, so that an interrupted sweep can be started again.
set -euo pipefail
[ $# -ge 2 ] || { echo "usage: $0 RANKS LEARNING_RATE..." >&2; exit 2; }

here=$(dirname "$0")
job=${JOB:-$here/mnist_mlp.py}
runs=${RUNS:-runs/sweep}
bin=$here/../.venv/bin
[ -x "$bin/mpitrain" ] || bin=$(dirname "$(command -v mpitrain)")
ranks=$1
shift

for rate in "$@"; do
    # shellcheck disable=SC2086
    "$bin/mpitrain" run -n "$ranks" "$job" --learning-rate "$rate" --run-dir "$runs/$rate" ${FLAGS:-} >/dev/null
done

printf '%-14s %s\n' "learning rate" "last validation"
for rate in "$@"; do
    printf '%-14s %s\n' "$rate" "$(grep -o '"validation.*[0-9]' "$runs/$rate/metrics.jsonl" | tail -n 1 | tr -d '"')"
done
