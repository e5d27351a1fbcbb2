"""The state of a run: whether it is alive, if this can be determined; a wrong clock does not change the state."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from mpitrain.monitor import heartbeat as status
from mpitrain.monitor.heartbeat import (
    BatchJob,
    Heartbeat,
    ProcessHost,
    RunEnd,
    State,
    Status,
    classify,
    read,
    states,
    write,
    write_submitted,
)
from mpitrain.process.run_directory import FAILURE, Failure, record_failure

from ...support.waiting import wait_until

HERE = ProcessHost("node1", "boot-a", "pid:[1]")
ELSEWHERE = ProcessHost("node2", "boot-b", "pid:[2]")
RUNNING = Status("running", 10, 100, "2 workers", 3, HERE, 17, "5", 0.0)


def alive(pid: int, start: str) -> bool:
    return (pid, start) == (17, "5")


def never(pid: int, start: str) -> bool:
    raise AssertionError("the process is not of this machine")


@pytest.mark.parametrize("state", ["finished", "stopped", "failed"])
def test_a_run_that_reports_how_it_ended_is_believed(state: status.State) -> None:
    assert classify(replace(RUNNING, state=state), ELSEWHERE, 1e9, never) == state


@pytest.mark.parametrize("age", [-1e6, 0.0, 1e6, None])
def test_on_its_own_machine_the_process_is_asked_whatever_the_clock_reports(age: float | None) -> None:
    assert classify(RUNNING, HERE, age, alive) == "running"
    assert classify(replace(RUNNING, pid=18), HERE, age, alive) == "died"
    assert classify(replace(RUNNING, pid_start="6"), HERE, age, alive) == "died"  # another process has this id


def test_a_machine_started_again_has_no_run_left() -> None:
    assert classify(RUNNING, replace(HERE, boot_id="boot-c", pid_namespace="pid:[9]"), 1.0, never) == "died"


def test_another_namespace_of_the_same_host_is_another_machine() -> None:
    assert classify(RUNNING, replace(HERE, pid_namespace="pid:[9]"), 1.0, never) == "running"


@pytest.mark.parametrize(
    ("age", "expected"),
    [(0.0, "running"), (60.0, "running"), (200.0, None), (-200.0, None), (1e5, "died"), (None, None)],
)
def test_from_elsewhere_a_file_of_doubtful_age_decides_nothing(age: float | None, expected: str | None) -> None:
    assert classify(RUNNING, ELSEWHERE, age, never) == expected


def test_what_is_written_is_read(tmp_path: Path) -> None:
    write(tmp_path, RUNNING)
    assert read(tmp_path) == RUNNING


def test_the_attempts_of_a_batch_job_keep_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = BatchJob("slurm", "4711", "night")
    write_submitted(tmp_path, "2 ranks", job)
    assert read(tmp_path) is not None and states([tmp_path]) == {tmp_path: "submitted"}
    for id_of_environment, expected in (("", job), ("4711", job), ("4712", None)):
        monkeypatch.setenv("SLURM_JOB_ID", id_of_environment)
        heartbeat = Heartbeat(tmp_path, "2 workers", 100, lambda: 0)
        heartbeat.end(RunEnd("stopped"))
        found = read(tmp_path)
        assert found is not None and (found.state, found.job) == ("stopped", expected)
    assert os.listdir(tmp_path) == [status.STATUS]


@pytest.mark.parametrize(("state", "expected"), [("stopped", "submitted"), ("finished early", "finished early")])
def test_a_stopped_run_can_be_submitted_again(state: State, expected: State, tmp_path: Path) -> None:
    Heartbeat(tmp_path, "2 workers", 100, lambda: 0).end(RunEnd(state))
    write_submitted(tmp_path, "2 ranks", BatchJob("slurm", "4711", "night"))
    assert states([tmp_path]) == {tmp_path: expected}


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", '{"state": "running"}', '{"host": 3}'])
def test_a_file_that_cannot_be_understood_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / status.STATUS).write_text(text)
    assert read(tmp_path) is None
    assert states([tmp_path]) == {tmp_path: "unknown"}


def test_a_heartbeat_lives_and_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "BEAT_S", 0.01)
    step = 5
    heartbeat = Heartbeat(tmp_path, "1 worker", 100, lambda: step)
    first = read(tmp_path)
    assert first is not None and (first.state, first.step, first.host) == ("running", 5, ProcessHost.own())
    assert states([tmp_path]) == {tmp_path: "running"}
    step = 7

    def is_newer() -> bool:
        newer = read(tmp_path)
        return newer is not None and newer.step == 7 and newer.heartbeat > first.heartbeat

    wait_until(is_newer, lambda: read(tmp_path), 10)
    heartbeat.end(RunEnd("finished"))
    heartbeat.end(RunEnd("failed"))
    assert states([tmp_path]) == {tmp_path: "finished"}


def test_a_killed_run_has_died(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from mpitrain.monitor.heartbeat import Heartbeat\n"
        "Heartbeat(Path(sys.argv[1]), '1 worker', 9, lambda: 1); print('up', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert states([tmp_path])[tmp_path] == "running"
        process.kill()
    assert states([tmp_path])[tmp_path] == "died"


def test_a_doubtful_run_is_watched(tmp_path: Path) -> None:
    quiet, beating = tmp_path / "quiet", tmp_path / "beating"
    for folder in (quiet, beating):
        folder.mkdir()
        write(folder, replace(RUNNING, host=ELSEWHERE))
        os.utime(folder / status.STATUS, (time.time() - 300, time.time() - 300))
    program = (
        "import sys, time; from dataclasses import replace; from pathlib import Path\n"
        "from mpitrain.monitor.heartbeat import read, write\n"
        "folder = Path(sys.argv[1]); time.sleep(0.2); old = read(folder)\n"
        "write(folder, replace(old, heartbeat=old.heartbeat + 1))"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(beating)]):
        assert states([quiet, beating], watch_s=3) == {quiet: "died", beating: "running"}


def test_a_failure_after_the_last_heartbeat_decides(tmp_path: Path) -> None:
    """A run of another host whose launcher has recorded a failure does not run, whatever the age of the file."""
    write(tmp_path, replace(RUNNING, host=ELSEWHERE))
    assert states([tmp_path])[tmp_path] == "running"
    record_failure(tmp_path, Failure("rank 1 has died", 1))
    os.utime(tmp_path / FAILURE, (time.time() + 1, time.time() + 1))
    assert states([tmp_path])[tmp_path] == "died"
    os.utime(tmp_path / FAILURE, (time.time() - 60, time.time() - 60))  # the failure of an earlier start
    assert states([tmp_path])[tmp_path] == "running"


def test_a_folder_that_cannot_be_written_is_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    heartbeat = Heartbeat(tmp_path / "gone", "1 worker", 1, lambda: 0)
    heartbeat.end(RunEnd("finished"))
    assert len(caplog.records) == 1
    assert "cannot be written" in caplog.text
