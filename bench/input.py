"""Input pipelines: examples per second of mpitrain, torch's DataLoader, Hugging Face datasets and tf.data.

    python bench/input.py [--rounds 5] [--peers PYTHON] [--only images parquet records training memory]

Every round runs each program once, in turn; a result is the median of the rounds. ``cpu_us`` is the CPU time of all
processes per example: if other programs use the cores, it is more reliable than the rate. ``PYTHON`` has torch,
datasets and tensorflow-cpu (``make bench-env``: .venv-input). Two processes (or threads of tf.data) load ``images`` and
``records``.

- ``images``: a folder of JPEG files of 256 x 256 pixels, decoded, cropped to 224, mirrored at random, as float32.
  The DataLoader has the best of several prefetch factors.
- ``parquet``: batches of 256 shuffled rows of 20 columns, as arrays.
- ``records``: TFRecord files with the same images, and with 20 numbers per example.
- ``training``: one rank with one thread and one data worker, on a core each, against the same examples in memory.
- ``memory``: the largest increase of the proportional set size (PSS) of a process and its two data workers while they
  load.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from environment import one_thread_and_own_kernels, use_this_checkout

BENCH = Path(__file__).parent
CASES = {
    "images": ["ours-images", "ours-dataset", "torch-images"],
    "parquet": ["ours-parquet", "datasets-parquet"],
    "records": ["ours-records", "tf-records", "ours-numbers", "tf-numbers"],
    "training": ["ours-training", "ours-arrays"],
    "memory": ["ours-memory"],
}
PREFETCH = (1, 2, 4, 8)  # of torch's DataLoader


def run(program: str, folder: Path, python: str, *words: str) -> dict[str, float]:
    """Run a program of ``jobs/input.py`` or ``peers/input.py`` and return its figures."""
    script = BENCH / ("jobs" if program.startswith("ours") else "peers") / "input.py"
    executable = sys.executable if program.startswith("ours") else python
    environment = dict(os.environ)
    if not program.startswith("ours"):
        environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        [executable, str(script), program, str(folder), *words], env=environment, stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        raise SystemExit(f"{program} failed")
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peers", default=str(BENCH.parent / ".venv-input" / "bin" / "python"))
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    arguments = parser.parse_args()
    one_thread_and_own_kernels()
    use_this_checkout()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run("ours-write", folder, arguments.peers)
        words = {}
        if "images" in arguments.only:
            rates = {factor: run("torch-images", folder, arguments.peers, str(factor))["rate"] for factor in PREFETCH}
            words["torch-images"] = [str(max(PREFETCH, key=lambda factor: rates[factor]))]
            print(f"the DataLoader's prefetch_factor: {words['torch-images'][0]}")
        for case in arguments.only:
            results: dict[str, list[dict[str, float]]] = defaultdict(list)
            for _ in range(arguments.rounds):
                for program in CASES[case]:
                    results[program].append(run(program, folder, arguments.peers, *words.get(program, [])))
            for program, figures in results.items():
                medians = {key: statistics.median(figure[key] for figure in figures) for key in figures[0]}
                print(f"{program:18}", "  ".join(f"{key} {value:,.1f}" for key, value in medians.items()), flush=True)


if __name__ == "__main__":
    main()
