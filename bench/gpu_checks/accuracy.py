"""Compare the validation accuracies of training on a GPU, in every precision, with those of training on a CPU.

    python bench/gpu_checks/accuracy.py cpu DATA_DIR FILE       writes the accuracies to FILE, on any machine
    python bench/gpu_checks/accuracy.py gpu DATA_DIR FILE       compares with FILE; exit status 1 if any differs

DATA_DIR contains four files in MNIST's format with 10,000 validation images; with fewer images, random differences may
exceed the tolerance.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from environment import ROOT, require_gpu, use_this_checkout

JOBS = ("mnist_mlp", "fashion_cnn")
PRECISIONS = ("float32", "tf32", "bfloat16", "float16")
TOLERANCE = 0.003


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("device", choices=["cpu", "gpu"])
    parser.add_argument("data_dir")
    parser.add_argument("file", type=Path)
    arguments = parser.parse_args()
    data_dir, file = arguments.data_dir, arguments.file
    use_this_checkout()
    if arguments.device == "cpu":
        accuracies = {job: accuracy(job, data_dir, "--device", "cpu") for job in JOBS}
        file.write_text(json.dumps(accuracies) + "\n")
        print(accuracies)
        return
    require_gpu()
    expected, ok = json.loads(file.read_text()), True
    for job in JOBS:
        for precision in PRECISIONS:
            found = accuracy(job, data_dir, "--device", "gpu", "--precision", precision)
            difference = found - expected[job]
            agrees = abs(difference) <= TOLERANCE
            ok = ok and agrees
            result = f"{100 * difference:+.2f} points  {'ok' if agrees else 'DIFFERS'}"
            print(f"{job:12} {precision:9} {found:.4f}, CPU {expected[job]:.4f}: {result}", flush=True)
    sys.exit(0 if ok else 1)


def accuracy(job: str, data_dir: str, *flags: str) -> float:
    """Train a job to its end and return its validation accuracy."""
    with tempfile.TemporaryDirectory() as run_dir:
        words = [sys.executable, "-m", "mpitrain", "train", str(ROOT / "jobs" / f"{job}.py"), "--data-dir", data_dir]
        words += ["--validate-steps", "0", "--run-dir", run_dir, *flags]
        done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            sys.exit(f"{job} {' '.join(flags)}: status {done.returncode}")
        lines = map(json.loads, (Path(run_dir) / "metrics.jsonl").read_text().splitlines())
        return [line["validation_accuracy"] for line in lines if "validation_accuracy" in line][-1]


if __name__ == "__main__":
    main()
