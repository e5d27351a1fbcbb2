"""Runs that scripts launch: their training, their end, and the attributes of ``Run``."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import mpitrain
from mpitrain import Job
from mpitrain.errors import LaunchError, UserError
from mpitrain.plan.job import load_job_file
from mpitrain.process import rank_status

from ..support.kills import ranks_of
from ..support.launch import JOBS, LAUNCHER_ENVIRONMENT, ROOT, Mpi, run
from ..support.results import final
from ..support.waiting import limit, wait_until

SCRIPTS = ROOT / "tests" / "support" / "scripts"
SLOW = JOBS / "slow.py"


@pytest.fixture(autouse=True)
def _launching(openmpi: Mpi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launch from a separate folder, in the environment in which other tests start MPI."""
    monkeypatch.chdir(tmp_path)
    for name, value in LAUNCHER_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> mpitrain.Run:
    """A run that has ended, found by its directory."""
    folder = tmp_path_factory.mktemp("finished")
    mpitrain.launch(
        JOBS / "small.py", ranks=2, run_dir=folder / "run", log_steps=10, env={"A_VARIABLE": "a, b", "OTHER": 1}
    ).wait(60)
    return mpitrain.Run(folder / "run")


def wait_for_state(run: mpitrain.Run, state: str) -> None:
    wait_until(lambda: run.status.state == state, lambda: run.status)


def launch_slow(run_dir: Path) -> mpitrain.Run:
    """Launch two ranks that take at most 50 steps per second, and wait until they train."""
    started = mpitrain.launch(SLOW, ranks=2, run_dir=run_dir, pause=0.02, train_steps=5_000, log_steps=1)
    wait_until(lambda: started.metrics, lambda: started.status)
    return started


def test_a_script_launches_its_functions(mpi: Mpi, tmp_path: Path) -> None:
    done = run([str(mpi.python), str(SCRIPTS / "two_runs.py"), str(tmp_path)], cwd=tmp_path)
    assert done.stdout.split() == ["finished", "20"] * 2, done.stdout + done.stderr
    for name, hidden_units in (("own", 6), ("imported", 7)):
        assert (64, hidden_units) in {array.shape for array in final(tmp_path / name).values()}


@pytest.mark.parametrize("page", ["README.md", "docs/python_api.md"])
def test_the_documented_script_works(openmpi: Mpi, page: str, tmp_path: Path) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    (code,) = [code for code in re.findall(r"^```python\n(.*?)^```", text, re.M | re.S) if "mpitrain.launch" in code]
    (tmp_path / "script.py").write_text(code)
    (tmp_path / "jobs").symlink_to(ROOT / "jobs")
    done = run([str(openmpi.python), "script.py"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (started,) = map(mpitrain.Run, (tmp_path / "runs").iterdir())
    assert started.status == mpitrain.RunStatus("finished", 500, 500)


@pytest.mark.parametrize("kind", ["lambda", "job", "path"])
def test_what_can_be_launched(kind: str, tmp_path: Path) -> None:
    small = load_job_file(JOBS / "small.py")
    made: Job = small(hidden_units=5)
    job = {"lambda": lambda width=5: made, "job": made, "path": str(JOBS / "small.py")}[kind]
    started = mpitrain.launch(job, train_steps=2, validate_steps=0)
    assert started.wait(60).state == "finished"
    assert started.path.parent == tmp_path / "runs"
    assert [path.name for path in started.checkpoints] == ["step-0000000002.h5"]


@pytest.mark.parametrize(
    "given",
    [
        {"hiden_units": 3},
        {"hidden_units": "many"},
        {"optimizer": print},
        {"mode": "asink"},
        {"mode": "async", "ps": 2},
        {"ranks": 0},
        {"env": {"not a name": 1}},
        {"env": 3},
        {"dry_run": True},
        {"train_steps": {}},
        {"run_dir": __file__},
    ],
    ids=str,
)
def test_wrong_arguments_are_refused_before_anything_is_written(given: dict[str, object], tmp_path: Path) -> None:
    with pytest.raises(UserError):
        mpitrain.launch(JOBS / "small.py", **{"ranks": 2, **given})  # type: ignore[arg-type]
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    "job",
    [3, Job, "no such file.py", lambda lock=threading.Lock(): None, None],
    ids=["number", "class", "missing", "lock", "none"],
)
def test_what_cannot_be_launched(job: object, tmp_path: Path) -> None:
    with pytest.raises(UserError):
        mpitrain.launch(job, ranks=2)  # type: ignore[arg-type]
    assert not [*tmp_path.iterdir()]


def test_a_rank_launches_nothing(openmpi: Mpi, tmp_path: Path) -> None:
    done = openmpi.run(1, "-c", "import mpitrain; mpitrain.launch('a.py')", cwd=tmp_path)
    assert done.returncode == 1 and "LaunchError" in done.stderr


def test_what_a_run_shows(finished: mpitrain.Run, tmp_path: Path) -> None:
    assert finished.status == mpitrain.RunStatus("finished", 100, 100)
    assert finished.wait(1).state == "finished"
    assert {type(line) for line in finished.metrics} == {dict}
    assert [line["step"] for line in finished.metrics if "learning_rate" in line] == list(range(10, 101, 10))
    assert [path.name for path in finished.checkpoints] == ["step-0000000100.h5"]
    assert all(word in repr(finished) for word in (str(finished.path), "finished", "100"))
    assert finished.report(tmp_path / "page.html").stat().st_size > 10_000
    assert finished.report() == finished.path / "report.html"
    with pytest.raises(UserError):
        mpitrain.Run(tmp_path / "absent")


def test_a_finished_run_is_not_trained_again(finished: mpitrain.Run) -> None:
    assert mpitrain.launch(JOBS / "small.py", ranks=2, run_dir=finished.path).wait(60).state == "finished"
    assert [path.name for path in finished.checkpoints] == ["step-0000000100.h5"]


@pytest.mark.parametrize("where", ["hook", "job"])
def test_a_failed_run_raises(where: str, tmp_path: Path) -> None:
    started = mpitrain.launch(JOBS / "raising.py", ranks=2, run_dir=tmp_path, where=where)
    with pytest.raises(mpitrain.RunFailed) as caught:
        started.wait(60, show=False)
    assert caught.value.run_dir == str(tmp_path)
    if where == "hook":
        assert caught.value.rank == 1 and "ValueError: on purpose" in caught.value.traceback
    else:  # a user error in the job function
        assert "ValueError: on purpose" in caught.value.reason
    assert started.status.state in ("failed", "died")
    with pytest.raises(mpitrain.RunFailed):
        mpitrain.Run(tmp_path).wait(1, show=False)


def test_a_killed_rank_is_named(tmp_path: Path) -> None:
    started = launch_slow(tmp_path)
    with pytest.raises(TimeoutError):
        started.wait(0.2, show=False)
    os.kill(rank_status.read(tmp_path)[1].pid, signal.SIGKILL)
    with pytest.raises(mpitrain.RunFailed) as caught:
        started.wait(60, show=False)
    assert caught.value.rank == 1 and caught.value.traceback == ""


def test_stopped_runs_resume(openmpi: Mpi, tmp_path: Path) -> None:
    started = launch_slow(tmp_path)
    wait_for_state(started, "running")
    with pytest.raises(LaunchError):
        mpitrain.launch(SLOW, run_dir=tmp_path)
    started.stop()
    assert started.wait(30).state == "stopped"
    (saved,) = started.checkpoints
    resumed = launch_slow(tmp_path)
    wait_for_state(resumed, "running")
    assert run([str(openmpi.python), "-c", f"import mpitrain; mpitrain.Run({str(tmp_path)!r}).stop()"]).returncode == 0
    assert resumed.wait(30, show=False).state == "stopped"
    assert resumed.checkpoints[0] == saved and len(resumed.checkpoints) == 2
    assert mpitrain.Run(tmp_path).wait(1).state == "stopped"


@pytest.mark.parametrize("moment", ["at its start", "twice"])
def test_a_run_is_stopped_without_saving(moment: str, tmp_path: Path) -> None:
    if moment == "twice":
        started = launch_slow(tmp_path)
        started.stop()
        time.sleep(0.3)  # signals within 0.1 s count as one
    else:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in a script that runs in the background
        try:
            started = mpitrain.launch(SLOW, run_dir=tmp_path, train_steps=5_000)
        finally:
            signal.signal(signal.SIGINT, before)
    started.stop()
    assert started.wait(30, show=False).state == "stopped"


@contextmanager
def waiting_script(openmpi: Mpi, run_dir: Path, steps: int) -> Iterator[subprocess.Popen[bytes]]:
    """A script that waits for its run, which is training."""
    words = [str(openmpi.python), str(SCRIPTS / "waiting.py"), str(SLOW), str(run_dir), str(steps)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True) as process:
        try:
            wait_until((run_dir / "metrics.jsonl").exists, "the metrics", process=process)
            yield process
        finally:
            process.kill()


def test_an_interrupt_stops_the_run(openmpi: Mpi, tmp_path: Path) -> None:
    with waiting_script(openmpi, tmp_path / "run", 5_000) as process:
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=limit(30))
    assert b"KeyboardInterrupt" in err and b"step" in out
    stopped = mpitrain.Run(tmp_path / "run")
    assert stopped.status.state == "stopped" and stopped.checkpoints


def test_a_run_survives_its_script(openmpi: Mpi, tmp_path: Path) -> None:
    with waiting_script(openmpi, tmp_path / "run", 100) as process:
        process.kill()
    found = mpitrain.Run(tmp_path / "run")
    wait_for_state(found, "running")
    assert found.wait(60, show=False).step == 100
    wait_until(lambda: not ranks_of(tmp_path / "run"), "the run leaves no process", 10)
