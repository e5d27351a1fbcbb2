"""What is told of a run that ended badly, from what ranks left and what launchers say."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from mpitrain.launcher.exit_report import read_deaths, read_lost
from mpitrain.launcher.restarts import Outcome, judge, pause_s, why_not_again
from mpitrain.process import rank_status as presence
from mpitrain.process.rank_status import Entry, Presence

LOST = "mpi4py.MPI.Exception: MPI_ERR_OTHER: known error not in list"
OPEN_MPI = """--------------------------------------------------------------------------
prterun noticed that process rank 1 with PID 28116 on node vm exited on
signal 9 (Killed).
--------------------------------------------------------------------------
"""
OPEN_MPI_4 = "mpirun noticed that process rank 1 with PID 0 on node vm exited on signal 9 (Killed).\n"
OPEN_MPI_STATUS = "   Process name: [prterun-vm-28205@1,1]\n   Exit code:    7\n"
MPICH = """=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES
=   PID 28134 RUNNING AT vm
=   EXIT CODE: 9
=   CLEANING UP REMAINING PROCESSES
=====
YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed (signal 9)
"""
INTEL = "".join(
    f"=   RANK {rank} PID {pid} RUNNING AT vm\n=   KILLED BY SIGNAL: {number} (x)\n"
    for rank, pid, number in ((0, 5, 9), (1, 6, 11), (2, 7, 9))
)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (OPEN_MPI, (1, 28116, "vm", 9, 0)),
        (OPEN_MPI_4, (1, None, "vm", 9, 0)),
        (OPEN_MPI_STATUS, (1, None, "", 0, 7)),
        (MPICH, (None, 28134, "vm", 9, 0)),
        (INTEL, (1, 6, "vm", 11, 0)),
    ],
)
def test_launchers_tell_who_died(said: str, expected: tuple[object, ...]) -> None:
    assert read_deaths(said)[0] == expected
    assert read_deaths("step 100  loss 0.3") == []


def test_launchers_tell_which_host_is_lost() -> None:
    assert read_lost("  HNP daemon   : [a@0,0] on node h1\n  Remote daemon: [a@0,1] on node h2\n") == "host h2"
    assert read_lost("  Remote host:   h2\n  Daemon exit status: 0\n") == "host h2"
    assert read_lost("control_cb (x.c:280): assert (!closed) failed") == "one of its hosts"
    assert read_lost("all is well") == ""


def rank(number: int, step: int = 41, **known: object) -> Entry:
    host, ready = f"h{number}", bool(known.pop("ready", True))
    return Entry(number, host, 100 + number, "", 50 + number, "worker", number, ready, step=step, **known)  # type: ignore[arg-type]


def judged(status: int, *entries: Entry, said: str = "") -> Outcome:
    return judge(status, said, entries, 3, "mpirun, process 7")


def test_how_a_run_ended_well() -> None:
    done = [rank(number, done=True) for number in range(3)]
    assert judged(0, *done) == Outcome("finished")
    assert judged(75, *(replace(entry, stopped=True) for entry in done)) == Outcome("stopped")
    assert judged(0) == Outcome("finished")  # nobody could write in the run directory


def test_a_crash_when_all_is_done_is_told_and_no_failure() -> None:
    done = [rank(number, done=True) for number in range(2)]
    ended = judged(139, *done, rank(2, done=True, ended_at=1.0, signal=11))
    assert ended.kind == "finished"
    assert ended.what.endswith("was killed by signal 11 (SIGSEGV) after its last step; everything is saved")


@pytest.mark.parametrize("number", [9, 15])
def test_what_a_launcher_ends_when_all_is_done_is_not_told(number: int) -> None:
    done = [rank(each, done=True, stopped=True) for each in range(2)]
    ended = judged(75, *done, rank(2, done=True, stopped=True, ended_at=1.0, signal=number))
    assert ended == Outcome("stopped")


def test_a_launcher_that_ends_with_0_before_its_ranks_have_ended() -> None:
    lost = judged(0, rank(0), rank(1), rank(2, done=True), said="Remote host: h1\n  Daemon exit status: 0\n")
    assert lost == Outcome("failed", "mpirun, process 7, has lost host h1, in step 42", 41)


def test_a_lost_host_is_told_before_the_exceptions_that_others_meet() -> None:
    said, met = "Remote host: h1\n  Daemon exit status: 0\n", {"status": 1, "ended_at": 1.0}
    assert judged(1, rank(0, error=LOST, **met), rank(1), said=said).what.startswith(
        "mpirun, process 7, has lost host h1"
    )
    assert "ValueError" in judged(1, rank(0, error="ValueError: no", **met), rank(1), said=said).what


@pytest.mark.parametrize(
    ("entries", "told"),
    [
        (
            [rank(0, ended_at=5.0, status=14), rank(1, 40, ended_at=6.0, signal=11), rank(2)],
            "rank 1 of 3 (worker 1) on h1, process 101, was killed by signal 11 (SIGSEGV), in step 41",
        ),
        (
            [rank(0, ended_at=6.0, signal=6), rank(1, ended_at=5.0, status=3)],
            "rank 1 of 3 (worker 1) on h1, process 101, ended with status 3, in step 42",
        ),
        (
            [rank(0), rank(1, ready=False, ended_at=1.0, signal=7)],
            "rank 1 of 3 (worker 1) on h1, process 101, was killed by signal 7 "
            "(SIGBUS; often for want of room in /dev/shm) before training had begun",
        ),
        (
            [rank(0, ended_at=1.0, status=1), rank(1, error="ValueError: no\nmore", ended_at=2.0, status=1)],
            "rank 1 of 3 (worker 1) on h1, process 101, ended with ValueError: no, in step 42",
        ),
        (
            [rank(0, error=LOST, ended_at=1.0, status=1), rank(1, 40, ended_at=2.0, signal=9)],
            "rank 1 of 3 (worker 1) on h1, process 101, was killed by signal 9 "
            "(SIGKILL; often by the kernel, for want of memory), in step 41",
        ),
        (
            [rank(0, error=LOST, status=1, ended_at=1.0), rank(1, error="ValueError: no", status=1, ended_at=2.0)],
            "rank 1 of 3 (worker 1) on h1, process 101, ended with ValueError: no, in step 42",
        ),
        (
            [rank(0, error=LOST, status=1, ended_at=1.0), rank(1, signal=15, ended_at=2.0)],
            f"rank 0 of 3 (worker 0) on h0, process 100, ended with {LOST}, in step 42",
        ),
        ([rank(0), rank(1)], "mpirun, process 7, ended with status 9, in step 42"),
        ([], "mpirun, process 7, ended with status 9 before any rank had begun"),
    ],
    ids=[
        "first cause",
        "earliest",
        "before",
        "exception",
        "met by another",
        "not MPI's",
        "MPI's",
        "no trace",
        "nobody",
    ],
)
def test_the_rank_that_died_is_told(entries: list[Entry], told: str) -> None:
    assert judged(9, *entries).what == told


def test_a_users_mistake_is_told_already() -> None:
    assert judged(2, rank(0, mistake=True)) == Outcome("mistake")


def test_another_attempt() -> None:
    at = [Outcome("failed", step=step) for step in (None, 0, 100, 102, 200)]
    assert not any(why_not_again(one, None, 3) for one in at)
    assert "twice before training" in why_not_again(at[0], at[0], 3)
    assert "failed twice in step 103" in why_not_again(at[3], at[2], 3)
    assert not why_not_again(at[4], at[3], 3)
    assert not why_not_again(at[1], at[0], 3)
    assert not why_not_again(Outcome("failed", gone=["h2"]), at[0], 3)
    assert [pause_s(number) for number in (1, 2, 3, 7, 30)] == [1, 2, 4, 60, 60]


# What ranks leave.


def test_what_a_rank_has_said_is_read(tmp_path: Path) -> None:
    one = Presence(tmp_path, 3)
    one.takes_role("ps", 1)
    one.at(1234567)
    one.failed(ValueError("é" * 5000), mistake=False)
    (found,) = presence.read(tmp_path)
    assert (found.rank, found.role, found.task, found.step, found.ready) == (3, "ps", 1, 1234567, False)
    assert found.error.startswith("ValueError: éé") and not found.mistake
    one.is_ready()
    one.is_done(stopped=True)
    presence.note_end(tmp_path, 3, found.pid, signal.SIGKILL, 0)
    (found,) = presence.read(tmp_path)
    assert found.ready and found.done and found.signal == signal.SIGKILL and found.step == 1234567
    presence.clear(tmp_path)
    assert presence.read(tmp_path) == [] and not list(tmp_path.iterdir())


def test_a_rank_that_ended_before_it_could_say_anything(tmp_path: Path) -> None:
    presence.folder_of(tmp_path).mkdir()
    presence.note_end(tmp_path, 0, 99_999_999, 0, 5)
    (found,) = presence.read(tmp_path)
    assert (found.pid, found.status, found.role) == (99_999_999, 5, "")


def test_another_attempts_entry_is_left_alone(tmp_path: Path) -> None:
    Presence(tmp_path, 0)
    presence.note_end(tmp_path, 0, 99_999_999, 0, 5)
    (found,) = presence.read(tmp_path)
    assert (found.pid, found.ended_at) == (os.getpid(), 0.0)


def test_nobody_watches() -> None:
    nobody = Presence(None, 0)
    nobody.at(3)
    nobody.is_ready()
