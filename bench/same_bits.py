"""Check that this checkout computes the same bits as another: parameters, optimizer slots, losses of whole runs.

    python bench/same_bits.py --baseline DIR [--cases sync-2 local-2]

Both checkouts train ``jobs/mnist_mlp.py`` on this machine for 200 steps. This checkout then resumes the baseline's
checkpoint of step 100, which must give the results of the baseline without interruption. All arrays of the last
checkpoints and the losses at every logged step are compared. The exit status is 1 if anything differs.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
from checkouts import THIS, Checkout
from environment import one_thread_and_own_kernels

STEPS, RESUMED_AT = 200, 100
CASES: dict[str, tuple[int, list[str]]] = {  # name: (ranks, flags)
    "sync-1": (1, []),
    "sync-2": (2, []),
    "sync-4": (4, []),
    "local-2": (2, ["--mode", "local", "--local-steps", "10"]),  # saves when it has averaged
    "async-1": (1, ["--mode", "async", "--validate-steps", "0"]),  # its snapshots for validation depend on timing
}
COMPARED = ("loss", "validation_loss", "validation_accuracy")


@dataclass(frozen=True)
class Result:
    """The results of a run: each dataset of the last checkpoint, by name; losses by step and name."""

    arrays: dict[str, Any]
    losses: dict[tuple[int, str], float]


def train(checkout: Checkout, case: str, run_dir: Path, *flags: str | Path) -> Result:
    ranks, flags_of_case = CASES[case]
    words = ["-m", "mpitrain", "run", "-n", str(ranks), checkout.folder / "jobs" / "mnist_mlp.py", "--device", "cpu"]
    if (checkout.folder / "mpitrain" / "core" / "subnormals.py").exists():  # older checkouts never flush
        words.append("--no-flush-denormals")
    words += ["--train-steps", str(STEPS), "--save-steps", str(RESUMED_AT), "--log-steps", "10", "--threads", "1"]
    checkout.run(*words, "--validate-steps", "50", *flags_of_case, "--run-dir", run_dir, *flags)
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    losses = {(line["step"], name): line[name] for line in lines for name in COMPARED if name in line}
    return Result(arrays_of(saved(run_dir, STEPS)), losses)


def saved(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step-{step:010d}.h5"


def arrays_of(path: Path) -> dict[str, Any]:
    """Read a checkpoint without the package, whose reader may differ between the checkouts."""
    found: dict[str, Any] = {}

    def visit(name: str, item: h5py.Group | h5py.Dataset) -> None:
        if isinstance(item, h5py.Dataset):
            found[name] = (item.dtype.str, item.shape, item[()].tobytes())

    with h5py.File(path) as file:
        file.visititems(visit)
    return found


def report(case: str, ours: Result, theirs: Result, after: int = 0) -> bool:
    """Print whether two runs have the same results in the steps after ``after``, and return it.

    ``after`` is 0, or the step from which one of the runs has resumed. A logged loss is the difference of two sums over
    the steps since a run began, so it is rounded differently in a resumed run. In a resumed run, losses count as the
    same up to a relative difference of 1e-12.
    """
    losses = [{at: loss for at, loss in run.losses.items() if at[0] > after} for run in (ours, theirs)]
    assert ours.arrays and losses[0], f"{case}: there is nothing to compare"
    found = [name for name in ours.arrays | theirs.arrays if ours.arrays.get(name) != theirs.arrays.get(name)]
    for at in sorted(losses[0] | losses[1]):
        a, b = (values.get(at, math.nan) for values in losses)
        if not (math.isclose(a, b, rel_tol=1e-12) if after else a == b):
            found.append(f"{at[1]} at step {at[0]}")
    same = f"same bits: {len(ours.arrays)} arrays, {len(losses[0])} losses"
    text = f"DIFFERENT in {len(found)} arrays and losses: {', '.join(found[:3])}" if found else same
    print(f"{case:18} {text}", flush=True)
    return not found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--baseline", type=Path, metavar="DIR", required=True, help="another checkout")
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    arguments = parser.parse_args()
    one_thread_and_own_kernels()
    baseline, passed = Checkout(arguments.baseline.resolve()), True
    for case in arguments.cases:
        with tempfile.TemporaryDirectory() as folder:
            theirs = train(baseline, case, Path(folder) / "theirs")
            passed &= report(case, train(THIS, case, Path(folder) / "ours"), theirs)
            checkpoint = saved(Path(folder) / "theirs", RESUMED_AT)
            resumed = train(THIS, case, Path(folder) / "resumed", "--resume", checkpoint)
            passed &= report(f"{case}, resumed", resumed, theirs, after=RESUMED_AT)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
