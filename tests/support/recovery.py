"""Runs whose processes are killed, and which restart from memory."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Collection
from pathlib import Path
from types import TracebackType

from mpitrain.checkpoint.memory import newest_state, states
from mpitrain.process import rank_status, state_folder

from .hosts.network import Hosts
from .kills import ranks_of
from .launch import LAUNCHER_ENVIRONMENT, Mpi
from .waiting import T, limit, wait_until

TIMEOUT_S = 90
NO_CHECKPOINTS = ("--save-secs", "0", "--save-steps", "0")  # except the last one


class KilledRun:
    """``mpitrain run`` with restarts from memory; there is no checkpoint on disk before its end.

    Attributes:
        process: The supervisor.
    """

    def __init__(
        self, mpi: Mpi, n: int, run_dir: Path, job: Path, *flags: str, hosts: Hosts | None = None, slots: int = 1
    ) -> None:
        """With ``hosts``, the first n hosts have ``slots`` ranks each; otherwise n ranks run on this machine."""
        self.run_dir, self._random = run_dir, random.Random(str(run_dir))
        self.gone = run_dir.with_suffix(".gone")  # the numbers of hosts that do not answer, one per line
        words = [str(mpi.python), "-m", "mpitrain", "run", "-n", str(n)] if hosts is None else []
        words += [] if hosts is None else hosts.run(mpi.python, [slots] * n)
        words += ["--max-restarts", "1000", str(job), *NO_CHECKPOINTS, *flags, "--run-dir", str(run_dir)]
        self._ended: set[int] = set()  # processes of attempts that a kill has ended
        self._output = run_dir.with_suffix(".output").open("a+")
        self.process = subprocess.Popen(
            words,
            env={
                **os.environ,
                **LAUNCHER_ENVIRONMENT,
                **({} if hosts is None else {**hosts.environment, "MPITRAIN_TEST_GONE": str(self.gone)}),
            },
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
        )

    def __enter__(self) -> KilledRun:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.terminate()
        self.process.wait(timeout=limit(TIMEOUT_S))
        self._output.close()

    @property
    def output(self) -> str:
        return self.run_dir.with_suffix(".output").read_text()

    @property
    def resumed_at(self) -> list[int]:
        """The steps from which restarts have resumed the run."""
        lines = map(json.loads, (self.run_dir / "metrics.jsonl").read_text().splitlines())
        return [line["resumed"] for line in lines if "resumed" in line]

    def wait_for_state(self, after: int = 0) -> int:
        """Return the step of the newest state in memory, once this step and those of all workers exceed ``after``.

        No worker may be a process of an attempt that ``kill`` has ended.
        """

        def kept_step() -> int:
            kept = newest_state(str(self.run_dir))
            workers = [rank for rank in rank_status.read(self.run_dir) if rank.role != "ps"]
            train = workers and all(rank.step > after and rank.pid not in self._ended for rank in workers)
            return kept.step if train and kept is not None and kept.step > after else 0

        return self._wait(kept_step)

    def wait_for_ranks(self, other_than: Collection[int] = ()) -> list[rank_status.RankStatus]:
        """Return the status of all ranks, once they train and none of their process ids is in ``other_than``."""

        def training() -> list[rank_status.RankStatus]:
            ranks = rank_status.read(self.run_dir)
            return ranks if all(rank.step and rank.pid not in other_than for rank in ranks) else []

        return self._wait(training)

    def wait_for_output(self, text: str) -> None:
        self._wait(lambda: text in self.output)

    def wait_for_step(self, step: int, poll_s: float = 0.002) -> None:
        """Wait until a worker has completed this step, or the run has ended."""

        def reached() -> bool:
            return max((rank.step for rank in rank_status.read(self.run_dir)), default=0) >= step

        wait_until(lambda: reached() or self.process.poll() is not None, lambda: self.output, TIMEOUT_S, poll_s=poll_s)

    def _wait(self, condition: Callable[[], T | None]) -> T:
        return wait_until(condition, lambda: self.output, TIMEOUT_S, process=self.process, poll_s=0.002)

    def kill(self, role: str, number: int) -> None:
        """Kill a rank of this role after a random delay of at most 30 ms."""
        time.sleep(self._random.uniform(0, 0.03))
        statuses = rank_status.read(self.run_dir)
        self._ended |= {rank.pid for rank in statuses}
        ranks = [rank for rank in statuses if rank.role == role]
        with contextlib.suppress(ProcessLookupError):
            os.kill(ranks[number % len(ranks)].pid, signal.SIGKILL)

    def end(self) -> None:
        """Wait for the end; the run must succeed, and leave no processes and no state in memory."""
        status = self.process.wait(timeout=limit(TIMEOUT_S))
        assert status == 0, self.output
        self.assert_nothing_is_left()

    def assert_nothing_is_left(self) -> None:
        # On other hosts, processes end after the supervisor.
        wait_until(lambda: not ranks_of(self.run_dir), lambda: ranks_of(self.run_dir), 5)
        assert not state_folder.existing(str(self.run_dir))
        assert not states(str(self.run_dir))
