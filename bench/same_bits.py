"""Check that whole runs have the same bits: as those of another checkout, or on any number of ranks.

    python bench/same_bits.py --baseline DIR [--cases sync-2 local-2]
    python bench/same_bits.py --virtual [--cases cnn gpt] [--steps 200]

Both checkouts train a job on this machine, or on two hosts in network namespaces (as root). This checkout then resumes
the baseline's checkpoint of half of the steps, which must give the results of the baseline without interruption. All
arrays of the last checkpoints and the losses at every logged step are compared. The exit status is 1 if anything
differs.

With ``--virtual``, jobs train with 8 virtual workers on 1, 2, 3, 5 and 8 ranks, and on two hosts; then once more, with
stops at random steps, after each of which the run resumes on another number of ranks. Everything in the last
checkpoints, and all recorded numbers except times, are compared with the run on one rank.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import h5py
from checkouts import THIS, Checkout
from environment import one_thread_and_own_kernels, use_this_checkout

STEPS = 200
LOG_STEPS = 10  # of runs with virtual workers
BENCH = Path(__file__).parent


class Case(NamedTuple):
    """A run: the ranks of each host, flags, a job file, and the number of steps."""

    ranks: list[int]
    flags: list[str]
    job: str = "jobs/mnist_mlp.py"
    steps: int = STEPS


_DILOCO = ["--mode", "local", "--local-steps", "10", "--outer-optimizer", "nesterov"]
_POWERSGD = ["--compress", "powersgd:2", "--compress-after", "10"]
_FRAGMENTS = ["--fragments", "2", "--overlap-steps", "2"]
_ASYNC = ["--mode", "async", "--validate-steps", "0"]  # its snapshots for validation depend on timing
CASES = {
    "sync-1": Case([1], []),
    "sync-2": Case([2], []),
    "sync-4": Case([4], []),
    "local-2": Case([2], ["--mode", "local", "--local-steps", "10"]),  # saves when it has averaged
    "async-1": Case([1], _ASYNC),
    "servers": Case([3], [*_ASYNC, "--ps", "2"]),  # with one worker, which makes all updates in one order
    "copies": Case([2], ["--no-shared-memory"]),
    "accumulation": Case([2], ["--accumulate-steps", "4"]),
    "clipping": Case([2], [], "bench/jobs/clipped_mlp.py"),
    "fragments": Case([2], [*_DILOCO, *_FRAGMENTS]),
    "fashion_cnn": Case([2], [], "jobs/fashion_cnn.py", 20),
    "torch_cnn": Case([2], [], "jobs/torch_cnn.py", 20),
    "torch_gpt": Case([2], [], "jobs/torch_gpt.py", 20),
    "hosts": Case([2, 1], []),
    "hosts-powersgd": Case([1, 1], _POWERSGD),
    "hosts-fragments": Case([1, 1], [*_DILOCO, *_FRAGMENTS, "--compress", "int8"]),
    "hosts-servers": Case([1, 1], [*_ASYNC, "--ps", "1"]),
}
COMPARED = ("loss", "validation_loss", "validation_accuracy")


VIRTUAL = {
    "mlp": ("jobs/mnist_mlp.py", []),
    "averages": ("bench/jobs/clipped_mlp.py", ["--decay", "0.99"]),
    "cnn": ("jobs/fashion_cnn.py", []),  # with BatchNorm and dropout
    "images": ("jobs/images.py", ["--folder"]),  # with augmentation; the data follows
    "tabular": ("jobs/tabular.py", ["--table"]),
    "texts": ("jobs/texts.py", []),
    "gpt": ("jobs/torch_gpt.py", []),
    "loop": ("bench/jobs/clipped_loop.py", []),
}
MADE = {"images": "digits", "tabular": "loans.parquet"}  # data that the job file writes
RANKS = (1, 2, 3, 5, 8)


@dataclass(frozen=True)
class Result:
    """The results of a run: each dataset of the last checkpoint, by name; losses by step and name."""

    arrays: dict[str, Any]
    losses: dict[tuple[int, str], float]


def train(checkout: Checkout, hosts: Callable[[], Any], name: str, run_dir: Path, *more: str | Path) -> Result:
    case = CASES[name]
    flags = ["--device", "cpu", "--no-flush-denormals", "--train-steps", case.steps, "--save-steps", case.steps // 2]
    flags += ["--log-steps", case.steps // 20, "--threads", "1", "--validate-steps", case.steps // 4, *case.flags]
    words = [*flags, "--run-dir", run_dir, *more, BENCH.parent / case.job]
    if len(case.ranks) == 1:
        checkout.run("-m", "mpitrain", "run", "-n", case.ranks[0], *words)
    else:
        # The variable reaches the other host only with --env.
        path = ["--env", f"PYTHONPATH={checkout.folder}"]
        command = hosts().run(Path(checkout.python), case.ranks, *path, *words)
        environment = {**os.environ, **hosts().environment, "PYTHONPATH": str(checkout.folder)}
        # Python imports from the working directory first, which may be this checkout.
        subprocess.run(command, cwd=checkout.folder, env=environment, stdout=subprocess.PIPE, check=True, timeout=300)
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    losses = {(line["step"], key): line[key] for line in lines for key in COMPARED if key in line}
    return Result(arrays_of(saved(run_dir, case.steps)), losses)


def virtual_words(case: str, folder: Path, steps: int) -> list[str | Path]:
    """Return the arguments of ``mpitrain run`` for a run with 8 virtual workers, without ranks and run directory."""
    job, flags = VIRTUAL[case]
    data = [folder / MADE[case]] if case in MADE else []
    if data and not data[0].exists():
        THIS.run(BENCH.parent / job, data[0])
    options: list[str | Path] = ["--virtual-workers", "8", "--device", "cpu", "--save-steps", "20"]
    options += ["--log-steps", str(LOG_STEPS)]
    if case == "loop":
        return [*options, BENCH.parent / job, str(steps)]
    options += ["--batch-size", "16", "--validate-steps", "50", "--train-steps", str(steps)]
    return [*options, BENCH.parent / job, *flags, *data]


def run_virtually(words: list[str | Path], ranks: int, run_dir: Path, kill_at: int | None = None) -> None:
    """Train on this checkout; kill the run when ``metrics.jsonl`` has a line of step ``kill_at`` or later."""
    command = [THIS.python, "-m", "mpitrain", "run", "-n", str(ranks), "--run-dir", str(run_dir), *map(str, words)]
    environment = {**os.environ, "PYTHONPATH": str(THIS.folder)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as process:
        while kill_at is not None and process.poll() is None:
            if any(step >= kill_at for step, _ in losses_of(run_dir)):
                process.kill()
            time.sleep(0.01)
        process.communicate(timeout=900)
    assert process.returncode in (0, -signal.SIGKILL), f"exit status {process.returncode}"


def losses_of(run_dir: Path) -> dict[tuple[int, str], float]:
    lines = metrics_of(run_dir)
    return {(line["step"], key): value for line in lines for key, value in line.items() if key in COMPARED}


def metrics_of(run_dir: Path) -> list[dict[str, Any]]:
    path = run_dir / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")] if path.exists() else []


def compare_virtual(case: str, steps: int, rng: random.Random, hosts: Callable[[], Any], folder: Path) -> bool:
    """Print whether runs of a case with virtual workers have the same results, and return it."""

    def result(run_dir: Path) -> Result:
        return Result(arrays_of(saved(run_dir, steps)), losses_of(run_dir))

    words, passed = virtual_words(case, folder, steps), True
    for ranks in RANKS:
        run_virtually(words, ranks, folder / str(ranks))
        if ranks > 1:
            passed &= report(f"{case}, {ranks} ranks", result(folder / str(ranks)), result(folder / "1"))
    path = ["--env", f"PYTHONPATH={THIS.folder}", "--run-dir", str(folder / "hosts")]
    environment = {**os.environ, **hosts().environment, "PYTHONPATH": str(THIS.folder)}
    command = hosts().run(Path(THIS.python), [2, 1], *path, *words)
    subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, timeout=900)
    passed &= report(f"{case}, 2 hosts", result(folder / "hosts"), result(folder / "1"))
    killed = sorted(rng.sample(range(10, steps - 40, 10), 2))
    for kill_at in [*killed, None]:
        run_virtually(words, rng.choice(RANKS), folder / "killed", kill_at)
    again = f"{case}, killed at {' and '.join(map(str, killed))}"
    # The first report after a resume is a mean over fewer steps, unless the run has resumed at a report.
    resumed_at = max(line["resumed"] for line in metrics_of(folder / "killed") if "resumed" in line)
    return passed & report(again, result(folder / "killed"), result(folder / "1"), after=resumed_at + LOG_STEPS - 1)


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
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--baseline", type=Path, metavar="DIR", help="another checkout")
    which.add_argument("--virtual", action="store_true", help="runs with virtual workers, on several numbers of ranks")
    parser.add_argument("--cases", nargs="*", choices=[*CASES, *VIRTUAL], help="default: all")
    parser.add_argument("--steps", type=int, default=STEPS, help="of the runs with virtual workers")
    arguments = parser.parse_args()
    one_thread_and_own_kernels()
    use_this_checkout()
    from tests.support.hosts.network import make_hosts

    passed = True
    with ExitStack() as stack:
        hosts = functools.cache(lambda: stack.enter_context(make_hosts(Path(sys.executable), 2)))
        for case in (arguments.cases or VIRTUAL) if arguments.virtual else ():
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            passed &= compare_virtual(case, arguments.steps, random.Random(case), hosts, folder)
        baseline = None if arguments.virtual else Checkout(arguments.baseline.resolve())
        for case in () if baseline is None else arguments.cases or CASES:
            half = CASES[case].steps // 2
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            theirs = train(baseline, hosts, case, folder / "theirs")
            passed &= report(case, train(THIS, hosts, case, folder / "ours"), theirs)
            resumed = train(THIS, hosts, case, folder / "resumed", "--resume", saved(folder / "theirs", half))
            passed &= report(f"{case}, resumed", resumed, theirs, after=half)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
