"""Trains, resumes, refuses, changes, kills and finishes one run in random orders, and checks its records.

    python bench/records.py [ORDERS]

Each order starts in an empty run directory and takes eight random actions. After each action, config.toml, the history,
and the state that ``mpitrain runs`` shows must agree with the action. Repeating a finished run, or a refused command,
must not change any file.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from mpitrain import checkpoint  # noqa: E402
from mpitrain.core.toml import read_toml  # noqa: E402
from mpitrain.monitor.heartbeat import read, states  # noqa: E402

JOB = ROOT / "tests" / "support" / "jobs" / "finishing.py"
ACTIONS = ("resume", "again", "refuse", "change", "kill", "interrupt", "finish early")
STEPS = 30  # number of steps that each training action adds


class Order:
    """One run and the expected content of its records."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.draw = folder, random.Random(seed)
        self.state, self.rate, self.goal = "", 0.01, 0
        self.versions: list[tuple[object, ...]] = []  # options of starts, each different from those of the start before

    def act(self) -> str:
        """Take one action; return a text of its name and the problem, if any."""
        action = self.draw.choice(ACTIONS if self.goal else ("resume", "kill"))
        before = self._files()
        expected, unchanged = {
            "resume": self._resume,
            "again": self._again,
            "refuse": self._refuse,
            "change": self._change,
            "kill": lambda: self._end_by(signal.SIGKILL),
            "interrupt": lambda: self._end_by(signal.SIGINT),
            "finish early": self._finish_early,
        }[action]()
        wrong = [] if expected is None else [f"status {expected}"]
        if unchanged and self._files() != before:
            wrong.append("files changed")
        found = states([self.folder])[self.folder]
        if found != self.state:
            wrong.append(f"state {found!r}, expected {self.state!r}")
        config = read_toml(self.folder / "config.toml")
        if (config["job"]["learning_rate"], config["run"]["train_steps"]) != (self.rate, self.goal):
            wrong.append(f"config.toml: {config['job']}, {config['run']['train_steps']} steps")
        if len(list(self.folder.glob("history/*"))) != len(self.versions):
            wrong.append(f"{len(list(self.folder.glob('history/*')))} versions, expected {len(self.versions)}")
        return f"{action}: {'; '.join(wrong)}" if wrong else f"{action}: ok"

    def _resume(self) -> tuple[int | None, bool]:
        """Continue training to the end."""
        if self.state == "finished early":
            return self._again()
        self.goal += STEPS
        self._record()
        status = self._run()
        self.state = "finished"
        return (None if status == 0 else status), False

    def _again(self) -> tuple[int | None, bool]:
        """Repeat the last command."""
        ended = self.state in ("finished", "finished early")
        if not ended:
            self._record()
        status = self._run()
        self.state = self.state if ended else "finished"
        return (None if status == 0 else status), ended

    def _refuse(self) -> tuple[int | None, bool]:
        """Run with a model, or a seed, that does not fit a checkpoint; without a checkpoint, continue training."""
        if not checkpoint.steps(self.folder / "checkpoints"):
            return self._resume()
        if self.state == "finished early":
            return self._again()
        status = self._run(*self.draw.choice([["--hidden-units", "16"], ["--seed", "7"]]))
        return (None if status == 2 else status), True

    def _change(self) -> tuple[int | None, bool]:
        """Continue training with another learning rate."""
        if self.state == "finished early":
            return self._again()
        self.rate = round(self.draw.uniform(0.001, 0.1), 6)
        return self._resume()

    def _end_by(self, number: signal.Signals) -> tuple[int | None, bool]:
        """Kill or interrupt a run in the middle."""
        if self.state == "finished early":
            return self._again()
        self.goal += STEPS
        self._record("--pause")
        with subprocess.Popen(
            self._words("--pause", "0.1"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as run:
            deadline = time.monotonic() + 60
            while states([self.folder])[self.folder] != "running" and time.monotonic() < deadline:
                time.sleep(0.05)
            time.sleep(self.draw.uniform(0.2, 2))
            run.send_signal(number)
        while states([self.folder])[self.folder] == "running" and time.monotonic() < deadline:
            time.sleep(0.05)  # the ranks of a killed supervisor end a moment later
        # The launcher of a killed supervisor sends SIGTERM to the ranks, which may have time to save and to record the
        # signal.
        self.state = "stopped" if number == signal.SIGINT or self._received_sigterm() else "died"
        return None, False

    def _received_sigterm(self) -> bool:
        status = read(self.folder)
        return status is not None and (status.state, status.reason) == ("stopped", "SIGTERM")

    def _finish_early(self) -> tuple[int | None, bool]:
        """Continue training until a hook finishes the run."""
        if self.state == "finished early":
            return self._again()
        self.goal += STEPS
        self._record("--limit")
        status = self._run("--limit", "1")
        self.state = "finished early"
        return (None if status == 0 else status), False

    def _record(self, *flags: str) -> None:
        """Record the options of a start."""
        options = (self.goal, self.rate, *flags)
        if options not in self.versions[-1:]:
            self.versions.append(options)

    def _run(self, *flags: str) -> int:
        return subprocess.run(self._words(*flags), capture_output=True, check=False, timeout=120).returncode

    def _words(self, *flags: str) -> list[str]:
        words = [sys.executable, "-m", "mpitrain", "run", "-n", "2", str(JOB), "--run-dir", str(self.folder)]
        return [*words, "--train-steps", str(self.goal), "--learning-rate", str(self.rate), *flags]

    def _files(self) -> dict[str, tuple[int, bytes]]:
        paths = [path for path in self.folder.rglob("*") if path.is_file()]
        # The next start removes the files that a killed run has left.
        paths = [path for path in paths if path.suffix != ".partial" and path.parent.name != ".ranks"]
        return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in paths}


def main() -> None:
    """Run the orders, and print the results of each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("orders", type=int, nargs="?", default=10)
    given = parser.parse_args()
    os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
    wrong = 0
    for seed in range(given.orders):
        with tempfile.TemporaryDirectory() as folder:
            order = Order(Path(folder, "run"), seed)
            results = [order.act() for _ in range(8)]
        wrong += not all(result.endswith(": ok") for result in results)
        print(f"{seed:2d}  {', '.join(results)}", flush=True)
    print(f"{given.orders - wrong} of {given.orders} orders as expected")


if __name__ == "__main__":
    main()
