# Runs the tests for a GPU in parallel, then the measurements; 8 minutes on a node with 16 cores and one H200.
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

python3 bench/gpu_checks/versions.py >"$results/versions.txt" 2>&1 &
python3 bench/gpu_checks/accuracy.py gpu "$images" bench/gpu_checks/accuracy.json >"$results/accuracy.txt" 2>&1 &
python3 bench/gpu_checks/agreement.py --jobs 3 >"$results/agreement.txt" 2>&1 &
for tool in memcheck racecheck; do
  compute-sanitizer --tool $tool --target-processes all --error-exitcode 9 python3 -m mpitrain train $small \
    --device gpu --batch-size 12 --train-steps 5 --run-dir "$(mktemp -d)" >"$results/$tool.txt" 2>&1
  echo "$tool: status $?"
done &
python3 -m pytest -n 12 -q -rf -p no:cacheprovider tests/gpu >"$results/tests.txt" 2>&1
tail -1 "$results/tests.txt"
wait
cat "$results/accuracy.txt" "$results/agreement.txt"

python3 bench/gpu_checks/kernels.py float32 bfloat16 >"$results/kernels.txt" 2>&1
python3 bench/gpu.py mnist_mlp update sums torch_models fashion_cnn wide_mlp --rounds 1 2>&1 | tee "$results/speed.txt"
