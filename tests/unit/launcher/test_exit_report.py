"""Reports of failed runs, made from the ranks' status files and the launchers' output."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from mpitrain.launcher.attempt import AttemptResult
from mpitrain.launcher.exit_report import parse_exits, parse_lost_hosts
from mpitrain.launcher.outcome import Kind, Outcome, classify
from mpitrain.launcher.restarts import reason_to_give_up, restart_delay_s
from mpitrain.process import rank_status
from mpitrain.process.rank_status import RankStatus, RankStatusFile

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
RANK_1 = "rank 1 of 3 (worker 1) on h1, process 101, "
INTEL = "".join(
    f"=   RANK {rank} PID {pid} RUNNING AT vm\n=   KILLED BY SIGNAL: {number} (x)\n"
    for rank, pid, number in ((0, 5, 9), (1, 6, 11), (2, 7, 9))
)


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (OPEN_MPI, (1, 28116, "vm", 9, 0)),
        (OPEN_MPI_4, (1, None, "vm", 9, 0)),
        (OPEN_MPI_STATUS, (1, None, "", 0, 7)),
        (MPICH, (None, 28134, "vm", 9, 0)),
        (INTEL, (1, 6, "vm", 11, 0)),
    ],
)
def test_launcher_output_names_the_rank_that_died(output: str, expected: tuple[object, ...]) -> None:
    assert parse_exits(output)[0] == expected
    assert parse_exits("step 100  loss 0.3") == []


def test_launcher_output_names_the_lost_host() -> None:
    assert parse_lost_hosts("  HNP daemon   : [a@0,0] on node h1\n  Remote daemon: [a@0,1] on node h2\n") == "host h2"
    assert parse_lost_hosts("  Remote host:   h2\n  Daemon exit status: 0\n") == "host h2"
    assert parse_lost_hosts("control_cb (x.c:280): assert (!closed) failed") == "one of its hosts"
    assert parse_lost_hosts("all is well") == ""


def rank(number: int, step: int = 41, **known: object) -> RankStatus:
    host, ready = f"h{number}", bool(known.pop("ready", True))
    role, is_training = str(known.pop("role", "worker")), bool(known.pop("is_training", ready))
    return RankStatus(
        number,
        host,
        100 + number,
        "",
        50 + number,
        role,
        number,
        ready,
        is_training,
        step=step,
        **known,  # type: ignore[arg-type]
    )


def result_of(status: int, *entries: RankStatus, output: str = "", **known: object) -> AttemptResult:
    """Return the result of an attempt whose launcher ended at second 9."""
    result = AttemptResult(7, status, output, "", 9.0, entries, {}, [], False, {})
    return replace(result, **known)  # type: ignore[arg-type]


def judged(status: int, *entries: RankStatus, output: str = "") -> Outcome:
    return replace(classify(result_of(status, *entries, output=output), 3, "mpirun, process 7"), ended_at=0.0)


def test_how_a_run_ended_well() -> None:
    done = [rank(number, done=True) for number in range(3)]
    assert judged(0, *done) == Outcome(Kind.FINISHED)
    assert judged(75, *(replace(entry, stopped=True) for entry in done)) == Outcome(Kind.STOPPED)
    assert judged(0) == Outcome(Kind.FINISHED)  # no rank could write its status


def test_a_crash_when_all_is_done_is_reported_and_no_failure() -> None:
    done = [rank(number, done=True) for number in range(2)]
    ended = judged(139, *done, rank(2, done=True, ended_at=1.0, signal=11))
    assert ended.kind == Kind.FINISHED
    assert ended.step is None
    for data in ("rank 2 of 3", "on h2", "process 102", "signal 11 (SIGSEGV)"):
        assert data in ended.reason


@pytest.mark.parametrize("number", [9, 15])
def test_what_a_launcher_ends_when_all_is_done_is_not_reported(number: int) -> None:
    done = [rank(each, done=True, stopped=True) for each in range(2)]
    ended = judged(75, *done, rank(2, done=True, stopped=True, ended_at=1.0, signal=number))
    assert ended == Outcome(Kind.STOPPED)


def test_a_launcher_that_ends_with_0_before_its_ranks_have_ended() -> None:
    lost = judged(0, rank(0), rank(1), rank(2, done=True), output="Remote host: h1\n  Daemon exit status: 0\n")
    assert (lost.kind, lost.step, lost.is_external) == (Kind.FAILED, 41, True)
    assert lost.reason.startswith("mpirun, process 7, ") and lost.reason.endswith("host h1, in step 42")


def test_a_lost_host_is_reported_before_the_exceptions_that_others_meet() -> None:
    output, met = "Remote host: h1\n  Daemon exit status: 0\n", {"status": 1, "ended_at": 1.0}
    reason = judged(1, rank(0, error=LOST, **met), rank(1), output=output).reason
    assert reason.startswith("mpirun, process 7, ") and "host h1" in reason
    assert "ValueError" in judged(1, rank(0, error="ValueError: no", **met), rank(1), output=output).reason


@pytest.mark.parametrize(
    ("entries", "who", "how", "step"),
    [
        (
            [rank(0, ended_at=5.0, status=14), rank(1, 40, ended_at=6.0, signal=11), rank(2)],
            RANK_1,
            "signal 11 (SIGSEGV)",
            40,
        ),
        ([rank(0, ended_at=6.0, signal=6), rank(1, ended_at=5.0, status=3)], RANK_1, "status 3", 41),
        ([rank(0), rank(1, ready=False, ended_at=1.0, signal=7)], RANK_1, "signal 7 (SIGBUS; ", None),
        (
            [rank(0, ended_at=1.0, status=1), rank(1, error="ValueError: no\nmore", ended_at=2.0, status=1)],
            RANK_1,
            "ValueError: no",
            41,
        ),
        (
            [rank(0, error=LOST, ended_at=1.0, status=1), rank(1, 40, ended_at=2.0, signal=9)],
            RANK_1,
            "signal 9 (SIGKILL; ",
            40,
        ),
        (
            [rank(0, error=LOST, status=1, ended_at=1.0), rank(1, error="ValueError: no", status=1, ended_at=2.0)],
            RANK_1,
            "ValueError: no",
            41,
        ),
        (
            [rank(0, error=LOST, status=1, ended_at=1.0), rank(1, signal=15, ended_at=2.0)],
            "rank 0 of 3 (worker 0) on h0, process 100, ",
            LOST,
            41,
        ),
        ([rank(0), rank(1)], "mpirun, process 7, ", "status 9", 41),
        ([], "mpirun, process 7, ", "status 9", None),
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
def test_the_rank_that_died_is_named(entries: list[RankStatus], who: str, how: str, step: int | None) -> None:
    outcome = judged(9, *entries)
    assert outcome.reason.startswith(who) and how in outcome.reason
    assert len(outcome.reason.splitlines()) == 1
    assert (f"in step {step + 1}" in outcome.reason) if step is not None else ("in step" not in outcome.reason)


def test_a_program_that_exits_with_0_too_early_is_named() -> None:
    exited = rank(1, is_program=True, done=True, ended_at=1.0)
    ended = rank(0, is_program=True, ended_at=2.0, signal=15)
    for others in ([ended], [rank(0, is_program=True)]):
        outcome = judged(1, exited, *others)
        assert (outcome.kind, outcome.rank) == (Kind.FAILED, 1) and outcome.reason.startswith(RANK_1)
    by_user = judged(1, exited, replace(ended, ended_at=9000.0))
    assert by_user.rank == 0 and "signal 15" in by_user.reason
    assert judged(1, exited, rank(0, is_program=True), output=OPEN_MPI.replace("rank 1", "rank 0")).rank == 0
    killed_rank_0 = MPICH.replace("28134", "50")  # its reaper
    killed_by_hydra = judged(1, exited, rank(0, is_program=True), output=killed_rank_0)
    assert killed_by_hydra.rank == 1
    long_after = judged(1, replace(exited, ended_at=-9000.0), rank(0, is_program=True), output=killed_rank_0)
    assert long_after.rank == 0
    killed = judged(1, exited, replace(ended, signal=9))
    assert (killed.kind, killed.rank) == (Kind.FAILED, 0)
    assert judged(-9, exited, rank(0, is_program=True)).rank is None  # the launcher was killed


@pytest.mark.parametrize("end", [{"signal": 9}, {"error": "ValueError: no", "status": 1}])
def test_a_rank_that_takes_no_steps_fails_at_the_step_of_the_others(end: dict[str, object]) -> None:
    server = rank(2, 0, role="ps", ended_at=1.0, **end)
    assert judged(1, rank(0, 40), rank(1, 41), server).step == 41
    restoring = rank(1, 0, is_training=False, ended_at=1.0, **end)
    assert judged(1, rank(0, 0, is_training=False), restoring).step is None


def test_a_killed_launcher_is_no_reason_to_give_up() -> None:
    killed = judged(-9)
    assert killed.kind is Kind.LAUNCH_FAILED
    assert reason_to_give_up(killed, killed, 3) == ""
    assert reason_to_give_up(judged(1), judged(1), 3) != ""


def test_a_user_error_is_reported_already() -> None:
    assert judged(2, rank(0, is_user_error=True)) == Outcome(Kind.USER_ERROR)


def test_what_the_launcher_did_itself_counts() -> None:
    stopped, failed = [rank(0, done=True, stopped=True)], [rank(0), rank(1, ended_at=5.0, status=3)]
    ended = classify(result_of(1, *failed, tracebacks={1: "trace"}, lost_hosts=["h0"]), 2, "mpirun")
    assert (ended.kind, ended.rank, ended.step, ended.ended_at) == (Kind.FAILED, 1, 41, 5.0)
    assert (ended.traceback, ended.lost_hosts) == ("trace", ["h0"])
    for entries in (stopped, failed):  # the launcher has already reported why it ended the ranks
        ended = classify(result_of(0, *entries, is_reported=True), len(entries), "mpirun")
        assert (ended.kind, ended.reason, ended.rank) == (Kind.FAILED, "", None)
    assert classify(result_of(0), 2, "mpirun", is_recorded_as_stopped=True).kind is Kind.STOPPED
    for status, output, is_transient in ((1, "", False), (1, "listener thread failed to start", True), (-9, "", True)):
        ended = classify(result_of(status, output=output), 2, "mpirun")
        assert (ended.kind, ended.is_transient, ended.ended_at) == (Kind.LAUNCH_FAILED, is_transient, 9.0)


def test_another_attempt() -> None:
    at = [Outcome(Kind.FAILED, step=step) for step in (None, 0, 100, 102, 200)]
    assert not any(reason_to_give_up(one, None, 3) for one in at)
    assert reason_to_give_up(at[0], at[0], 3) and "step" not in reason_to_give_up(at[0], at[0], 3)
    assert "103" in reason_to_give_up(at[3], at[2], 3)
    assert not reason_to_give_up(at[4], at[3], 3)
    assert not reason_to_give_up(at[1], at[0], 3)
    assert not reason_to_give_up(Outcome(Kind.FAILED, lost_hosts=["h2"]), at[0], 3)
    assert [restart_delay_s(number) for number in (1, 2, 3, 8, 30)] == [0, 1, 2, 60, 60]


# What ranks leave.


def test_what_a_rank_has_printed_is_read(tmp_path: Path) -> None:
    one = RankStatusFile(tmp_path, 3)
    one.set_role("ps", 1)
    one.set_step(1234567)
    one.set_failed(ValueError("é" * 5000), is_user_error=False)
    (found,) = rank_status.read(tmp_path)
    assert (found.rank, found.role, found.task, found.step, found.ready) == (3, "ps", 1, 1234567, False)
    assert found.error.startswith("ValueError: éé") and not found.is_user_error
    one.set_failed(AssertionError(), is_user_error=False)
    assert rank_status.read(tmp_path)[0].error == "AssertionError"
    one.set_ready()
    one.set_done(stopped=True)
    rank_status.record_end(tmp_path, 3, found.pid, signal.SIGKILL, 0)
    (found,) = rank_status.read(tmp_path)
    assert found.ready and found.done and found.signal == signal.SIGKILL and found.step == 1234567
    rank_status.clear(tmp_path)
    assert rank_status.read(tmp_path) == [] and not list(tmp_path.iterdir())


def test_a_rank_that_ended_before_it_could_say_anything(tmp_path: Path) -> None:
    rank_status.folder_of(tmp_path).mkdir()
    rank_status.record_end(tmp_path, 0, 99_999_999, 0, 5)
    (found,) = rank_status.read(tmp_path)
    assert (found.pid, found.status, found.role) == (99_999_999, 5, "")


def test_another_attempts_entry_is_left_alone(tmp_path: Path) -> None:
    RankStatusFile(tmp_path, 0)
    rank_status.record_end(tmp_path, 0, 99_999_999, 0, 5)
    (found,) = rank_status.read(tmp_path)
    assert (found.pid, found.ended_at) == (os.getpid(), 0.0)


def test_nobody_watches() -> None:
    nobody = RankStatusFile(None, 0)
    nobody.set_step(3)
    nobody.set_ready()
