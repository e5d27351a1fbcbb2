#!/bin/bash
# Trains a job, validates it, and exports the parameters; each command runs only if the previous command succeeded.
#
#     jobs/chain.sh RANKS RUN_DIR JOB [FLAG...]
#
# The script can be restarted at any time with the same arguments; completed training is not repeated.
set -euo pipefail
[ $# -ge 3 ] || { echo "usage: $0 RANKS RUN_DIR JOB [FLAG...]" >&2; exit 2; }
ranks=$1 run_dir=$2
shift 2

bin=$(dirname "$0")/../.venv/bin
[ -x "$bin/mpitrain" ] || bin=$(dirname "$(command -v mpitrain)")

# Status 75: stopped early by a signal or a time limit, with a checkpoint. Run this script again to continue.
"$bin/mpitrain" run -n "$ranks" "$@" --run-dir "$run_dir"
# Check that no checkpoint is corrupt.
"$bin/mpitrain" verify "$run_dir"
# Training is complete, so this run only validates: loss and accuracy on the validation examples.
"$bin/mpitrain" run -n "$ranks" "$@" --run-dir "$run_dir" | grep '^at step'
rm -f "$run_dir/parameters.npz"
"$bin/mpitrain" export "$run_dir" --to npz --output "$run_dir/parameters.npz"
