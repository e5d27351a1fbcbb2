"""What is left after any process of a run is killed: nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from mpitrain.process import rank_status

from ..support.kills import ranks_of
from ..support.launch import JOBS, Mpi

JOB = JOBS / "hanging.py"


def start(mpi: Mpi, folder: Path, steps: int, *flags: str) -> subprocess.Popen[str]:
    words = ["-m", "mpitrain", "run", "-n", "2", *flags, str(JOB), "--kind", "none", "--steps", str(steps)]
    words += ["--run-dir", str(folder), "--save-steps", "20"]
    return subprocess.Popen([str(mpi.python), *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for_step(process: subprocess.Popen[str], folder: Path, step: int = 200) -> list[rank_status.RankStatus]:
    """Return the status of the ranks after a step at which all have recorded their temporary files."""
    deadline = time.monotonic() + 60
    while True:
        assert time.monotonic() < deadline and process.poll() is None
        statuses = rank_status.read(folder)
        # The reaper records the files twice a second while a rank starts, and once more after that.
        if len(statuses) == 2 and all(status.step > step for status in statuses):
            return statuses
        time.sleep(0.1)


def child_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def wait_until_gone(folder: Path, paths: list[str]) -> None:
    deadline = time.monotonic() + 20
    while (left := [path for path in paths if os.path.exists(path)]) or ranks_of(folder):
        assert time.monotonic() < deadline, left or "ranks"
        time.sleep(0.1)


@pytest.mark.parametrize("victim", ["rank", "reaper", "launcher", "supervisor"])
def test_nothing_is_left_after_a_kill(mpi: Mpi, victim: str, tmp_path: Path) -> None:
    with start(mpi, tmp_path, 1_000_000) as process:
        try:
            rank = wait_for_step(process, tmp_path)[1]
            paths = [path for found in rank_status.read_temporary(tmp_path).values() for path in found]
            assert any(path.startswith("/dev/shm/") and os.path.exists(path) for path in paths)
            pids = {"rank": rank.pid, "reaper": rank.reaper, "supervisor": process.pid}
            os.kill(pids.get(victim) or child_of(process.pid), signal.SIGKILL)
            output, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    if victim == "supervisor":
        with start(mpi, tmp_path, 1) as again:
            assert again.wait(timeout=60) == 0
    else:
        assert process.returncode == 1
        assert output.count("was killed by signal 9") == 1
    wait_until_gone(tmp_path, paths)
    assert not (tmp_path / ".ranks").exists()
    assert not list(tmp_path.glob("checkpoints/*.partial"))


def test_a_run_continues_after_kills(openmpi: Mpi, tmp_path: Path) -> None:
    with start(openmpi, tmp_path, 1_000_000, "--max-restarts", "2") as process:
        try:
            for victim in range(2):
                rank = wait_for_step(process, tmp_path, 200 + 200 * victim)[victim]
                os.kill(rank.pid, signal.SIGKILL)
                deadline = time.monotonic() + 60
                while any(status.pid == rank.pid for status in rank_status.read(tmp_path)):
                    assert time.monotonic() < deadline
                    time.sleep(0.02)
            wait_for_step(process, tmp_path, 600)
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=30) == os.EX_TEMPFAIL
        finally:
            process.kill()
    assert not (tmp_path / ".ranks").exists()


@pytest.mark.parametrize("kind", ["sleep", "stop"])
def test_one_interrupt_ends_a_run_that_hangs(openmpi: Mpi, kind: str, tmp_path: Path) -> None:
    words = ["-m", "mpitrain", "run", "-n", "2", str(JOB), "--kind", kind, "--run-dir", str(tmp_path)]
    with subprocess.Popen([str(openmpi.python), *words], stderr=subprocess.PIPE, text=True) as process:
        try:
            deadline = time.monotonic() + 60
            while len(rank_status.read_activities(tmp_path)) < 2 or process.poll() is not None:
                assert time.monotonic() < deadline
                time.sleep(0.1)
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=30)
        finally:
            process.kill()
    assert process.returncode == 128 + signal.SIGINT
    assert "rank 1" in err and "rank 0: waiting for rank 1" in err
    assert not ranks_of(tmp_path)
