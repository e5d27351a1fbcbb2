"""A short form of ``bench/signals.py``; Ctrl-Z; Ctrl-C when the ranks cannot save."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mpitrain import checkpoint
from mpitrain.process import rank_status
from mpitrain.process.pid import process_state

from ..support.launch import JOBS, Mpi
from ..support.signals import MODES, Sender
from ..support.waiting import limit, wait_until

JOB = JOBS / "hanging.py"


@pytest.mark.parametrize("mode", MODES)
def test_a_run_ends_soon_after_a_signal(openmpi: Mpi, mode: str, tmp_path: Path) -> None:
    Sender(openmpi, mode, tmp_path / "run", seed=1).send(2)


@contextmanager
def run_of(mpi: Mpi, folder: Path, *flags: str) -> Iterator[subprocess.Popen[str]]:
    """A run of three ranks with at least 10 completed steps, in a separate process group, as a shell starts it."""
    words = [str(mpi.python), "-m", "mpitrain", "run", "-n", "3", str(JOB), "--run-dir", str(folder), *flags]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True, preexec_fn=os.setpgrp) as process:
        try:
            wait_until(lambda: max(steps_of(folder), default=0) >= 10, lambda: steps_of(folder), process=process)
            yield process
        finally:
            process.kill()


def children_of(pid: int) -> list[int]:
    threads = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for thread in threads for child in thread.read_text().split()]


def first_child_of(pid: int) -> int:
    return children_of(pid)[0]


def steps_of(folder: Path) -> list[int]:
    return [status.step for status in rank_status.read(folder)]


def test_ctrl_z_suspends_the_ranks_until_the_run_is_continued(openmpi: Mpi, tmp_path: Path) -> None:
    hangs_s = str(limit(2.0))
    with run_of(openmpi, tmp_path, "--kind", "none", "--steps", "1000000", "--hang-timeout", hangs_s) as process:
        process.send_signal(signal.SIGTSTP)
        wait_until(lambda: process_state(process.pid) == "T", "the supervisor is suspended")
        ranks = rank_status.read(tmp_path)
        suspended = [pid for rank in ranks for pid in (rank.pid, rank.reaper)]
        wait_until(lambda: {*map(process_state, suspended)} == {"T"}, lambda: [*map(process_state, suspended)])
        assert process_state(first_child_of(process.pid)) == "S"  # so that the launcher can end the ranks
        time.sleep(limit(3.0))  # longer than the limit of hangs
        before = steps_of(tmp_path)
        assert before == [rank.step for rank in ranks]
        process.send_signal(signal.SIGCONT)
        wait_until(lambda: min(steps_of(tmp_path)) > max(before) + 10, lambda: steps_of(tmp_path), process=process)
        process.terminate()
        assert process.wait(timeout=limit(20)) == 75


def test_ctrl_z_suspends_the_ranks_of_a_probe(openmpi: Mpi, tmp_path: Path) -> None:
    words = [str(openmpi.python), "-m", "mpitrain", "probe", "-n", "2", str(JOBS / "small.py")]
    with subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.DEVNULL, preexec_fn=os.setpgrp) as process:

        def ranks() -> list[int]:
            """Return the reapers and the ranks."""
            reapers = [pid for launcher in children_of(process.pid) for pid in children_of(launcher)]
            return [*reapers, *(rank for reaper in reapers for rank in children_of(reaper))]

        try:
            wait_until(lambda: len(ranks()) >= 4, ranks, process=process)
            process.send_signal(signal.SIGTSTP)
            wait_until(lambda: process_state(process.pid) == "T", "the supervisor is suspended")
            wait_until(lambda: {process_state(pid) for pid in ranks()} == {"T"}, "the ranks are suspended")
            process.send_signal(signal.SIGCONT)
            wait_until(lambda: "T" not in map(process_state, [process.pid, *ranks()]), "all processes continue")
            assert process.wait(timeout=limit(60)) == 0
        finally:
            process.kill()


@pytest.mark.parametrize("rank", [0, 1], ids=["server", "worker"])
def test_ctrl_c_continues_a_stopped_rank_so_that_the_run_can_save(openmpi: Mpi, rank: int, tmp_path: Path) -> None:
    flags = ("--mode", "async", "--ps", "1", "--ps-placement", "first", "--kind", "none", "--steps", "1000000")
    with run_of(openmpi, tmp_path, *flags) as process:
        os.kill(rank_status.read(tmp_path)[rank].pid, signal.SIGSTOP)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=limit(20))
    assert process.returncode == 75
    assert checkpoint.steps(tmp_path / "checkpoints")


def test_ctrl_c_ends_a_run_whose_ranks_wait_in_a_save_for_one_that_hangs(openmpi: Mpi, tmp_path: Path) -> None:
    with run_of(openmpi, tmp_path, "--kind", "sleep", "--save-steps", "20") as process:
        wait_until(lambda: max(steps_of(tmp_path)) >= 19, lambda: steps_of(tmp_path), process=process)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=limit(15))
    assert process.returncode == 130  # nothing was saved
    _, gave_up, ended = [line for line in err.splitlines() if line.startswith("mpitrain: ")]
    assert "rank 1" in gave_up and "SIGINT" in ended, err
