"""The speed of the matrix products of small models with different sets of kernels of OpenBLAS.

    python bench/openblas.py [--rounds 7] [--kernels Haswell Zen SkylakeX Cooperlake SapphireRapids]

Each round starts a process with one thread for each set (``OPENBLAS_CORETYPE``), in turn. Prints the median and the
range over the rounds, in GFLOP/s; ``default`` is OpenBLAS's own choice. ``mpitrain.core.openblas`` overrides the choice
only for CPUs on which another set is faster for all products in every round.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

from environment import one_thread_and_own_kernels

SHAPES = {"forward": (100, 784, 100), "backward": (784, 100, 100), "forward 1024": (100, 784, 1024)}
AVX512 = ("SkylakeX", "Cooperlake", "SapphireRapids")
WORKER = """
import json, sys, time
import numpy as np
from threadpoolctl import threadpool_info
found = {"used": next(item["architecture"] for item in threadpool_info() if item["internal_api"] == "openblas")}
for name, (m, k, n) in json.loads(sys.argv[1]).items():
    a = np.ones((k, m), np.float32).T if name == "backward" else np.ones((m, k), np.float32)
    b, out = np.ones((k, n), np.float32), np.empty((m, n), np.float32)
    count, times = max(1, int(2e9 / (2 * m * k * n))), []
    for _ in range(7):
        began = time.perf_counter()
        for _ in range(count):
            np.matmul(a, b, out=out)
        times.append((time.perf_counter() - began) / count)
    found[name] = 2e-9 * m * k * n / sorted(times)[3]
print(json.dumps(found))
"""


def measure(kernels: str) -> dict[str, float | str]:
    """Return the speed of each product in GFLOP/s, and the kernels that OpenBLAS has used."""
    environment = {**os.environ, **({} if kernels == "default" else {"OPENBLAS_CORETYPE": kernels})}
    words = [sys.executable, "-c", WORKER, json.dumps(SHAPES)]
    found: dict[str, float | str] = json.loads(
        subprocess.run(words, env=environment, stdout=subprocess.PIPE, check=True, text=True).stdout
    )
    return found


def main() -> None:
    cpu = Path("/proc/cpuinfo").read_text()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--kernels", nargs="*", default=["Haswell", "Zen", *(AVX512 if " avx512f " in cpu else ())])
    arguments = parser.parse_args()
    one_thread_and_own_kernels()
    speeds: dict[str, list[dict[str, float | str]]] = defaultdict(list)
    for _ in range(arguments.rounds):
        for kernels in ("default", *arguments.kernels):
            speeds[kernels].append(measure(kernels))
    print(next(line.partition(": ")[2] for line in cpu.splitlines() if line.startswith("model name")))
    for kernels, rounds in speeds.items():
        text = f"{kernels:15} ({rounds[0]['used']:14})"
        for name in SHAPES:
            column = [float(found[name]) for found in rounds]
            text += f"  {name} {statistics.median(column):6.1f} ({min(column):.1f} to {max(column):.1f})"
        print(text)


if __name__ == "__main__":
    main()
