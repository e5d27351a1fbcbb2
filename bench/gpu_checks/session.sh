# Runs the tests for a GPU in parallel, then the measurements; an estimated 12 minutes on a
# node with 16 cores and one H200. The exit status is 1 if a check has failed; the output tells which.
#
#     bash bench/gpu_checks/session.sh WHEELS IMAGES RESULTS
#
# WHEELS: folder with the wheels, see gpu_checklist.md. IMAGES: Fashion-MNIST's four files. RESULTS: folder for the output.
set -u
wheels=$1 images=$2 results=$3
mkdir -p "$results"
. bench/gpu_checks/env.sh "$wheels" /tmp/site || exit
export OMPI_MCA_mpi_yield_when_idle=1
small=tests/support/jobs/small.py

# The first run compiles the kernels: if it fails, nothing else needs to be tried.
python3 bench/gpu_checks/device.py || exit
if ! python3 -m mpitrain train $small --device gpu --train-steps 20 --run-dir "$(mktemp -d)" >"$results/first.txt" 2>&1; then
  tail -40 "$results/first.txt"
  exit 1
fi

status=0
check() { # NAME COMMAND...: run a check with its output in a file, and print its exit status
  local code=0
  "${@:2}" >"$results/$1.txt" 2>&1 || code=$? status=1
  echo "$1: status $code"
  return $code
}
sanitizer() { # TOOL JOB
  compute-sanitizer --tool "$1" --target-processes all --error-exitcode 9 python3 -m mpitrain train "$2" \
    --device gpu --batch-size 12 --train-steps 5 --run-dir "$(mktemp -d)"
}
jobs=()
check versions python3 bench/gpu_checks/versions.py & jobs+=($!)
check accuracy python3 bench/gpu_checks/accuracy.py gpu "$images" bench/gpu_checks/accuracy.json & jobs+=($!)
check agreement python3 bench/gpu_checks/agreement.py --jobs 3 & jobs+=($!)
for tool in memcheck racecheck; do
  check $tool sanitizer $tool $small & jobs+=($!)
  check $tool-cnn sanitizer $tool jobs/fashion_cnn.py & jobs+=($!)
done
check tests python3 -m pytest -n 12 -q -rf -p no:cacheprovider tests/gpu
for job in "${jobs[@]}"; do wait "$job" || status=1; done
tail -1 "$results/tests.txt"
cat "$results/accuracy.txt" "$results/agreement.txt"

check speed python3 bench/gpu.py mnist_mlp update sums torch_models fashion_cnn wide_mlp --rounds 1
cat "$results/speed.txt"
exit $status
