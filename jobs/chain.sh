#!/bin/bash
# Trains a job, measures the result, and exports it: each step only if the one before it went well.
#
#     jobs/chain.sh RANKS RUN_DIR JOB [FLAG...]
#
# It can be started again at any time with the same words: what is done is not done again.
set -euo pipefail
[ $# -ge 3 ] || { echo "usage: $0 RANKS RUN_DIR JOB [FLAG...]" >&2; exit 2; }
ranks=$1 run_dir=$2
shift 2

bin=$(dirname "$0")/../.venv/bin
[ -x "$bin/mpitrain" ] || bin=$(dirname "$(command -v mpitrain)")

# Status 75: stopped early by a signal or a time limit, with a checkpoint. Whoever started this chain starts it again.
"$bin/mpitrain" run -n "$ranks" "$@" --run-dir "$run_dir"
# Every byte of the checkpoints is as it was written.
"$bin/mpitrain" verify "$run_dir"
# Nothing is left to train, so this measures: loss and accuracy on the validation examples.
"$bin/mpitrain" run -n "$ranks" "$@" --run-dir "$run_dir" | grep '^at step'
rm -f "$run_dir/parameters.npz"
"$bin/mpitrain" export "$run_dir" --to npz --output "$run_dir/parameters.npz"
