"""BatchNorm: its rounding errors against PyTorch's, and its speed against another checkout's.

    python bench/batch_norm.py [--torch .venv-torch/bin/python] [--rows 64]
    python bench/batch_norm.py --baseline DIR [--rounds 10]

The first form normalizes batches of many means and deviations on 1 to 4 ranks with synchronized statistics, and with
PyTorch in one process. An error is the largest deviation from a reference of 80 bits, divided by the largest absolute
value in the reference. The second form measures forward and backward together; ratio 1 is for float32, ratio 2 for
float64. The script starts itself with --inner on ranks and in checkouts.

A file of batches has the arrays ``float64_x`` and ``float64_dy``, shape (batches, rows, features). A file of results
has ``float64_y`` and ``float64_dx``. Both have the same arrays for float32.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from checkouts import Checkout, compare
from environment import one_thread_and_own_kernels

ROOT = Path(__file__).parent.parent
OFFSETS, DEVIATIONS, FEATURES, RANKS = (0, 1, 1e3, 1e4, 1e6, 1e8), (1e-3, 1, 1e3), 16, (1, 2, 3, 4)
CASES = list(itertools.product(OFFSETS, DEVIATIONS))
DTYPES = ("float32", "float64")
SHAPES = ((64, 128), (100, 1024), (6400, 32), (78400, 32))  # rows and features; the last two are sizes of images


def norm_of(features: int, dtype: str) -> Any:
    """Return a BatchNorm layer with initial parameters."""
    from mpitrain import nn

    norm = nn.BatchNorm(features, sync=True)
    layout = nn.layout_of(norm, (features,), dtype)
    params, grads = np.zeros((2, layout.size), dtype)
    nn.bind(norm, layout, params, grads)
    nn.initialize(norm, layout, params, 0)
    return norm


def inner_step(batches_file: str, results_file: str) -> None:
    """Normalize each batch, of which each rank has a part, and write the results on rank 0."""
    from mpitrain import nn
    from mpitrain.comm.mpi import MPI, start

    comm = start()
    batches, results = np.load(batches_file), {}

    def sum_over_workers(array: np.ndarray) -> None:
        comm.Allreduce(MPI.IN_PLACE, array)

    for dtype in DTYPES:
        x, dy = (np.array_split(batches[f"{dtype}_{name}"], comm.size, axis=1)[comm.rank] for name in ("x", "dy"))
        norm, steps = norm_of(x.shape[2], dtype), []
        for examples, gradients in zip(x, dy, strict=True):
            ctx = nn.Context(training=True, sum_over_workers=sum_over_workers if comm.size > 1 else None)
            steps.append((norm.forward(examples, ctx).copy(), norm.backward(gradients.copy())))
        for name, parts in zip(("y", "dx"), map(np.array, zip(*steps, strict=True)), strict=True):
            results[f"{dtype}_{name}"] = np.concatenate(comm.allgather(parts), axis=1)
    if comm.rank == 0:
        np.savez(results_file, **results)


def inner_speed(rows: int, features: int) -> None:
    """Print forward and backward passes per second, for each type."""
    from mpitrain import nn

    speeds = []
    for dtype in DTYPES:
        norm, ctx = norm_of(features, dtype), nn.Context(training=True)
        x, dy = np.random.default_rng(0).standard_normal((2, rows, features)).astype(dtype)
        repeats, seconds = max(2, 1_000_000 // x.size), []
        for _ in range(40):
            began = time.process_time()  # other processes may interrupt this one
            for _ in range(repeats):
                norm.forward(x, ctx)
                norm.backward(dy)
            seconds.append(time.process_time() - began)
        speeds.append(repeats / min(seconds))
    print(json.dumps(speeds))


def draw(rows: int) -> dict[str, np.ndarray]:
    """Return a batch and a gradient for every case and type."""
    rng, batches = np.random.default_rng(0), {}
    for dtype in DTYPES:
        drawn = [offset + deviation * rng.standard_normal((rows, FEATURES)) for offset, deviation in CASES]
        batches[f"{dtype}_x"] = np.array(drawn, dtype)
        batches[f"{dtype}_dy"] = rng.standard_normal((len(CASES), rows, FEATURES)).astype(dtype)
    return batches


def reference(x: np.ndarray, dy: np.ndarray, eps: float = 1e-5) -> tuple[np.ndarray, np.ndarray]:
    """Return y and the gradient of x of one batch, in 80 bits."""
    # Differences from the first row are small numbers, whose mean has a smaller rounding error.
    x, dy = x.astype(np.longdouble) - x[0], dy.astype(np.longdouble)
    x -= x.mean(axis=0)
    inverse = 1 / np.sqrt((x * x).mean(axis=0) + np.longdouble(eps))
    y = x * inverse
    return y, inverse * (dy - dy.mean(axis=0) - y * (dy * y).mean(axis=0))


def errors(batches: dict[str, np.ndarray], results: dict[str, np.ndarray], dtype: str) -> list[float]:
    """Return for every case the larger error of y and of the gradient of x, in units of the type's epsilon."""
    found = []
    for index in range(len(CASES)):
        exact = reference(batches[f"{dtype}_x"][index], batches[f"{dtype}_dy"][index])
        relative = [
            float(np.abs(results[f"{dtype}_{name}"][index] - one).max() / (np.abs(one).max() or 1))
            for name, one in zip(("y", "dx"), exact, strict=True)
        ]
        found.append(max(relative) / float(np.finfo(dtype).eps))
    return found


def run(words: list[str | Path], results: Path) -> dict[str, np.ndarray]:
    """Run a program that writes the file ``results``; return the arrays of this file."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for name in ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"):
        environment[name] = "1"
    subprocess.run([*map(str, words)], check=True, env=environment)
    return dict(np.load(results))


def compare_errors(torch: str, rows: int) -> bool:
    """Print the errors of PyTorch, and of mpitrain by number of ranks; return whether all are within the bound."""
    batches, is_good = draw(rows), True
    with tempfile.TemporaryDirectory() as folder:
        given, results = Path(folder) / "batches.npz", Path(folder) / "results.npz"
        np.savez(given, **batches)
        theirs = run([torch, ROOT / "bench" / "peers" / "batch_norm.py", given, results], results)
        ours = {}
        for ranks in RANKS:
            mpirun = [Path(sys.executable).parent / "mpirun", "-n", str(ranks), "--oversubscribe", "--bind-to", "none"]
            ours[ranks] = run([*mpirun, sys.executable, __file__, "--inner", "step", given, results], results)
    print("errors in units of eps        PyTorch" + "".join(f"  {ranks} rank{'s' * (ranks > 1)}" for ranks in RANKS))
    for dtype in DTYPES:
        columns = [errors(batches, found, dtype) for found in (theirs, *ours.values())]
        for (offset, deviation), (peer, *own) in zip(CASES, zip(*columns, strict=True), strict=True):
            is_good = is_good and max(own) <= max(4 * peer, 16)
            print(f"{dtype} {offset:8g} +- {deviation:<6g} {peer:11.3g}" + "".join(f"{error:8.2f}" for error in own))
    print("all within max(4 PyTorch, 16 eps)" if is_good else "not all within max(4 PyTorch, 16 eps)")
    return is_good


def speed_of(rows: int, features: int) -> Callable[[Checkout], list[float]]:
    def measure(checkout: Checkout) -> list[float]:
        speeds: list[float] = json.loads(checkout.run(__file__, "--inner", "speed", str(rows), str(features)))
        return speeds

    return measure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", default=str(ROOT / ".venv-torch" / "bin" / "python"))
    parser.add_argument("--rows", type=int, default=64, help="rows of a batch")
    parser.add_argument("--baseline", type=Path, help="another checkout, for the comparison of speeds")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--inner", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    one_thread_and_own_kernels()
    if arguments.inner and arguments.inner[0] == "step":
        inner_step(*arguments.inner[1:])
    elif arguments.inner:
        inner_speed(*map(int, arguments.inner[1:]))
    elif arguments.baseline is not None:
        for rows, features in SHAPES:
            baseline = Checkout(arguments.baseline.resolve())
            compare(f"{rows} x {features}", baseline, speed_of(rows, features), arguments.rounds)
    elif not compare_errors(arguments.torch, arguments.rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
