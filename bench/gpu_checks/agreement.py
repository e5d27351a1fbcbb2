"""Compare 200 steps of each example job on a GPU with the same steps on a CPU, in float64 and float32.

    python bench/gpu_checks/agreement.py [--steps 200] [--jobs 4]

For each job and type, prints the relative difference of all parameters (the norm of the difference over the norm) and
of the last training loss. TF32 is off. Dropout is off: PyTorch's random numbers on a GPU differ from those on a CPU.
The exit status is 1 if a job fails, or if its parameters in float64 or its loss in float32 differ by more than 1e-5.
Parameters in float32 may differ more: Adam amplifies the rounding of gradients that are almost zero.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import h5py
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from environment import ROOT, require_gpu, use_this_checkout

TOLERANCE = 1e-5
JOBS: dict[str, list[str]] = {
    "mnist_mlp": [],
    "mnist_tutorial": [],
    "fashion_cnn": ["--dropout", "0"],
    "images": [],
    "tabular": [],
    "texts": [],
    "torch_cnn": ["--dropout", "0"],
    "torch_fine_tuning": [],
    "torch_gpt": ["--dropout", "0"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--jobs", type=int, default=4, help="jobs compared at the same time")
    parser.add_argument("--device", choices=["gpu", "cpu"], default="gpu", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    use_this_checkout()
    os.environ["OMP_NUM_THREADS"] = "1"
    if arguments.device == "gpu":
        require_gpu()
    with tempfile.TemporaryDirectory() as folder:
        write_data(Path(folder))
        with ThreadPoolExecutor(arguments.jobs) as threads:
            agreements = list(threads.map(lambda job: compare(job, Path(folder), arguments), JOBS))
    sys.exit(0 if all(agreements) else 1)


def write_data(folder: Path) -> None:
    """Write the files of the jobs that read examples from files."""
    for job, output in (("images", "digits"), ("tabular", "loans.parquet")):
        subprocess.run([sys.executable, str(ROOT / "jobs" / f"{job}.py"), output], cwd=folder, check=True)


def compare(job: str, folder: Path, arguments: argparse.Namespace) -> bool:
    """Print the differences of a job; return whether they are within the tolerance."""
    runs = {
        "float64": ("cpu", "float64"),
        "float64 gpu": (arguments.device, "float64"),
        "float32": ("cpu", "float32"),
        "float32 gpu": (arguments.device, "float32"),
    }
    results = {}
    for name, (device, dtype) in runs.items():
        run_dir = folder / f"{job}-{name.replace(' ', '-')}"
        words = [sys.executable, "-m", "mpitrain", "train", str(ROOT / "jobs" / f"{job}.py"), *JOBS[job]]
        words += ["--device", device, "--threads", "1", "--dtype", dtype, "--run-dir", str(run_dir)]
        words += ["--train-steps", str(arguments.steps), "--log-steps", str(arguments.steps), "--validate-steps", "0"]
        done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"{job:18} {name}: failed: {done.stderr.strip()[-1500:]}", flush=True)
            return False
        results[name] = result_of(run_dir)
    differences, text = {}, f"{job:18}"
    for dtype in ("float64", "float32"):
        (params, loss), (other_params, other_loss) = results[dtype], results[f"{dtype} gpu"]
        of_params = float(np.linalg.norm(other_params - params) / np.linalg.norm(params))
        differences[dtype] = of_params, abs(other_loss - loss) / abs(loss)
        text += "  {}: parameters {:.0e}, loss {:.0e}".format(dtype, *differences[dtype])
    agrees = max(differences["float64"][0], differences["float32"][1]) <= TOLERANCE
    print(text + ("" if agrees else "  DIFFERS"), flush=True)
    return agrees


def result_of(run_dir: Path) -> tuple[np.ndarray, float]:
    """Return all parameters of the last checkpoint in one vector, and the last loss."""
    values = []
    with h5py.File(max((run_dir / "checkpoints").glob("step-*.h5"))) as file:
        file["params"].visititems(
            lambda _, item: values.append(item[()].ravel()) if isinstance(item, h5py.Dataset) else None
        )
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return np.concatenate(values).astype(np.float64), [line["loss"] for line in lines if "loss" in line][-1]


if __name__ == "__main__":
    main()
