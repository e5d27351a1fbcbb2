"""Learners (``--join``): the accuracy of their common model, and their speed with and without failures.

    python bench/learners.py accuracy [--seeds 3] [--epochs 5] [--job mnist_mlp] [--programs local-2 learners-2]
    python bench/learners.py accuracy --job torch_gpt --words "" --total-steps 2400
    python bench/learners.py failures [--learners 2] [--minutes 5]
    python bench/learners.py speed [--rounds 5]

- ``accuracy``: learners of one rank each that start at once, and ``--mode local`` with the same outer optimizer on as
  many ranks, train the same number of examples: epochs of Fashion-MNIST, or ``--total-steps`` of ``torch_gpt``, of all
  learners together. Where the job has no accuracy, its validation loss is compared.
- ``failures``: learners on one core each, as far as there are cores. Every 30 s, all processes of a random one are
  killed; 5 s later it starts again. The examples/s that were merged are compared with the undisturbed rate times the
  share of the time in which the learners were past their start. In the end, it is counted how often each example was
  merged.
- ``speed``: a learner against the same run without ``--join``; alone, and beside another one that takes twice as long
  for a step: runs on other cores slow each other, too. In turns, on one core each; medians.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from environment import ROOT, one_thread_and_own_kernels, use_this_checkout

use_this_checkout()
from mpitrain.monitor.metrics import read_lines  # noqa: E402
from mpitrain.strategy.learners.ledger import Ledger  # noqa: E402
from mpitrain.strategy.learners.store import Folder, Register  # noqa: E402

MPITRAIN = (sys.executable, "-P", "-m", "mpitrain")
PAUSED = ROOT / "bench" / "jobs" / "paused_mlp.py"
COUNTED = ROOT / "bench" / "programs" / "counted.py"
EXAMPLES = 6000  # of its data set
PERIOD_S, REST_S = 30.0, 5.0
Process = subprocess.Popen[bytes]


def start(core: int | None, *words: object) -> Process:
    """Start ``mpitrain run`` in a process group of its own, on one core."""
    pinned = [] if core is None else ["taskset", "-c", core]
    command = [*pinned, *MPITRAIN, "run", "--threads", 1, *words]
    return subprocess.Popen(list(map(str, command)), stdout=subprocess.DEVNULL, start_new_session=True)


def learner(folder: Path, number: int, core: int | None, *words: object) -> Process:
    return start(core, "-n", 1, "--join", folder, "--run-dir", folder / "learners" / str(number), *words)


def end(*processes: Process) -> None:
    statuses = [process.wait() for process in processes]
    if any(statuses):
        raise SystemExit("a run has failed")


@contextmanager
def killed_at_end(processes: list[Process]) -> Iterator[None]:
    try:
        yield
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def accuracy(given: argparse.Namespace) -> None:
    found: dict[str, list[float]] = defaultdict(list)
    job = (ROOT / "jobs" / f"{given.job}.py", "--validate-steps", 0, *given.words.split())
    for seed in range(given.seeds):
        for program in given.programs:
            with tempfile.TemporaryDirectory() as temporary:
                folder = Path(temporary, "run")
                kind, _, number = program.partition("-")
                length = ("--data-dir", given.data, "--train-epochs", given.epochs)
                if given.total_steps:
                    length = ("--steps", given.total_steps // (int(number) if kind == "local" else 1))
                words = (*job, *length, "--seed", seed)
                if kind == "local":
                    local = ("--mode", "local", "--outer-optimizer", "nesterov", "--local-steps", 64)
                    end(start(None, "-n", number, "--run-dir", folder, *local, *words))
                else:
                    end(*[learner(folder, k, k % (os.cpu_count() or 1), *words) for k in range(int(number))])
                done = subprocess.run(
                    [*MPITRAIN, "evaluate", folder, "--json"], check=True, capture_output=True, text=True
                )
                result = json.loads(done.stdout)
                is_accuracy = "validation_accuracy" in result
                found[program].append(100 * result["validation_accuracy"] if is_accuracy else result["validation_loss"])
            print(f"seed {seed}, {program}: {found[program][-1]:.3f}", flush=True)
    for program, values in found.items():
        difference = statistics.mean(values) - statistics.mean(found[given.programs[0]])
        print(f"{program}: {statistics.mean(values):.3f}, {difference:+.3f}", flush=True)


def merged(folder: Path) -> int:
    """Return the number of examples that the common parameters contain."""
    data = Register(Folder(folder / "exchange"), "fragment-0").read().data
    return int(json.loads(data.split(b"\n", 2)[1])["examples"]) if data else 0


def state(folder: Path, number: int) -> dict[str, int]:
    """Return what a learner says of itself."""
    data = Folder(folder / "exchange").read(f"state.{number}")
    return json.loads(data) if data else {"generation": 0, "examples": 0}


class Campaign:
    """Learners of which some are killed; counts what each process has trained and brought to the common model."""

    def __init__(self, folder: Path, count: int) -> None:
        self.folder, self.count, self.chance = folder, count, random.Random(1)
        self.died_s, self.former = [0.0] * count, [0] * count
        self.merged: dict[tuple[int, int], int] = {}  # examples of a generation of a learner that were merged
        self.trained: dict[tuple[int, int], Path] = {}  # the file with all that it has trained
        self.processes = [self.start(k) for k in range(count)]

    def start(self, k: int) -> Process:
        return learner(self.folder, k, k % (os.cpu_count() or 1), COUNTED, self.folder, k)

    def trains(self, k: int) -> bool:
        """Return whether a learner is past its start; note what it has trained and what was merged."""
        now, data = state(self.folder, k), Register(Folder(self.folder / "exchange"), "fragment-0").read().data
        for name, (generation, _, examples, *_) in json.loads(data.split(b"\n", 2)[1])["merged"].items():
            self.merged[int(name), generation] = examples
        if self.died_s[k] or now["generation"] <= self.former[k] or not now["examples"]:
            return False
        self.trained[k, now["generation"]] = max(self.folder.glob(f"{k}.*"), key=lambda file: file.suffix)
        return True

    def kill(self, k: int) -> None:
        self.former[k], self.died_s[k] = state(self.folder, k)["generation"], time.monotonic()
        os.killpg(self.processes[k].pid, signal.SIGKILL)
        self.processes[k].wait()

    def rate(self, seconds: float, kills: bool = False) -> tuple[float, float]:
        """Return the merged examples/s, and the share of the time in which learners trained."""
        began, before, trained, looks, kill = time.monotonic(), merged(self.folder), 0, 0, PERIOD_S
        while (now := time.monotonic()) < began + seconds:
            if kills and now - began >= kill:
                kill += PERIOD_S
                if not self.died_s[victim := self.chance.randrange(self.count)]:
                    self.kill(victim)
            for k in range(self.count):
                if self.died_s[k] and now - self.died_s[k] >= REST_S:
                    self.died_s[k], self.processes[k] = 0.0, self.start(k)
                trained, looks = trained + self.trains(k), looks + 1
            time.sleep(0.2)
        return (merged(self.folder) - before) / (time.monotonic() - began), trained / looks

    def wait_for_all(self) -> None:
        while not merged(self.folder) or not all(self.trains(k) for k in range(self.count)):
            assert all(process.poll() is None for process in self.processes), "a learner has ended"
            time.sleep(0.2)

    def count_examples(self) -> None:
        """Stop all learners, and compare what was merged with what was given out."""
        subprocess.run([*MPITRAIN, "stop", self.folder], check=True)
        for process in self.processes:
            process.wait()
        for k in range(self.count):
            self.trains(k)
        ledger = Ledger.parse(Register(Folder(self.folder / "exchange"), "ledger").read().data)
        given = np.ones(ledger.next, int)
        for lo, hi in (*ledger.free, *(each for member in ledger.members.values() for each in member.held)):
            given[lo:hi] = 0
        expected = np.bincount(np.flatnonzero(given) % EXAMPLES, minlength=EXAMPLES)
        found = np.zeros(EXAMPLES, int)
        steps = 0
        for which, file in self.trained.items():
            numbers = np.fromfile(file, np.int32)
            found += np.bincount(numbers[: self.merged.get(which, 0)], minlength=EXAMPLES)
            steps += len(numbers)
        print(
            f"{given.sum():,} examples were given out and not given back, {found.sum():,} were merged, "
            f"{merged(self.folder):,} as the model says; {np.maximum(expected - found, 0).sum():,} are missing, "
            f"{np.maximum(found - expected, 0).sum():,} were merged twice, {steps - found.sum():,} were not merged"
        )


def failures(given: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        campaign = Campaign(Path(temporary, "run"), given.learners)
        with killed_at_end(campaign.processes):
            campaign.wait_for_all()
            time.sleep(10)
            first, _ = campaign.rate(60)
            print(f"undisturbed: {first:,.0f} merged examples/s", flush=True)
            rate, share = campaign.rate(60 * given.minutes, kills=True)
            print(f"with kills: {rate:,.0f} merged examples/s; learners trained in {100 * share:.1f} % of the time")
            campaign.wait_for_all()
            last, _ = campaign.rate(60)
            usual = (first + last) / 2
            print(f"undisturbed again: {last:,.0f}; {100 * rate / (usual * share):.1f} % of what was possible")
            campaign.count_examples()


def speed_of(folder: Path) -> float:
    """Return the median of a run's examples/s, without its first interval."""
    speeds = [line["examples_per_s"] for line in read_lines(folder / "metrics.jsonl") if "examples_per_s" in line]
    return statistics.median(speeds[1:])


def speed(given: argparse.Namespace) -> None:
    found: dict[str, list[float]] = defaultdict(list)
    words = (PAUSED, "--validate-steps", 0, "--data-dir", given.data, "--log-secs", 1)
    for _ in range(given.rounds):
        with tempfile.TemporaryDirectory() as temporary:
            folders = (Path(temporary, name) for name in ("run", "learner", "runs", "slow", "learners"))
            run, alone, beside, slow, both = folders
            joins = "--local-steps", given.local_steps
            end(start(0, "-n", 1, "--run-dir", run, *words, "--train-steps", given.steps))
            found["run"].append(speed_of(run))
            end(learner(alone, 0, 0, *words, *joins, "--train-steps", given.steps))
            found["learner"].append(speed_of(alone / "learners" / "0"))
            paused = "--pause", 100 / found["run"][-1]
            pair = [
                start(0, "-n", 1, "--run-dir", beside, *words, "--train-steps", given.steps),
                start(1, "-n", 1, "--run-dir", slow, *words, "--train-steps", given.steps * 3 // 4, *paused),
            ]
            end(*pair)
            found["run beside a slow run"].append(speed_of(beside))
            steps = "--train-steps", given.steps * 3 // 2
            end(learner(both, 0, 0, *words, *joins, *steps), learner(both, 1, 1, *words, *joins, *steps, *paused))
            found["learner beside a slow one"].append(speed_of(both / "learners" / "0"))
        print({name: round(values[-1]) for name, values in found.items()}, flush=True)
    run_s, one, run_beside, one_beside = (statistics.median(values) for values in found.values())
    print(f"run {run_s:,.0f}, learner {one:,.0f} examples/s: {100 * (run_s / one - 1):.1f} % overhead")
    print(
        f"beside one of half the speed: run {run_beside:,.0f}, learner {one_beside:,.0f} examples/s: "
        f"{100 * (run_beside / one_beside - 1):.1f} % overhead"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("program", choices=["accuracy", "failures", "speed"])
    parser.add_argument("--data", default="/usr/share/datasets/fashion-mnist")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--total-steps", type=int, help="in place of epochs, for torch_gpt")
    parser.add_argument("--job", default="mnist_mlp")
    parser.add_argument("--words", default="--hidden-units 500", help="further arguments of the job")
    parser.add_argument("--programs", nargs="+", default=["local-2", "learners-2"])
    parser.add_argument("--learners", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--local-steps", type=int, default=64)
    given = parser.parse_args()
    one_thread_and_own_kernels()
    {"accuracy": accuracy, "failures": failures, "speed": speed}[given.program](given)


if __name__ == "__main__":
    main()
