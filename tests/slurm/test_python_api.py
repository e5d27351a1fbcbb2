"""Runs that Python submits to a real Slurm cluster: waiting, stopping, and jobs that are still pending."""

from __future__ import annotations

from pathlib import Path

import pytest

import mpitrain
from mpitrain.plan.job import load_job_file

from ..support.launch import JOBS, ROOT, Mpi
from ..support.slurm.site import Site, startup_failed
from ..support.waiting import wait_until

SLOW = JOBS / "slow.py"


@pytest.fixture(autouse=True)
def _logged_in(site: Site, openmpi: Mpi, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of a user of the cluster."""
    monkeypatch.chdir(site.folder)
    for name, value in site.environment(openmpi).items():
        monkeypatch.setenv(name, value)


def submit(run_dir: Path, **options: object) -> mpitrain.Run:
    function = lambda pause=0.0: load_job_file(SLOW)(pause)  # noqa: E731
    return mpitrain.submit(function, nodes=2, time="5", run_dir=run_dir, log_steps=1, **options)


def job_of(site: Site, run: mpitrain.Run) -> str:
    """Return the id of the last job of a run."""
    output = site.cluster.call("squeue", "-h", "-t", "all", "-o", "%i %o").stdout
    return max((line.split()[0] for line in output.splitlines() if str(run.path) in line), key=int)


def test_a_stopped_job_is_not_requeued_and_can_be_submitted_again(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    run = submit(site.folder / "stopped from python", pause=0.05, train_steps=5_000)
    assert run.status.state == "submitted"
    wait_until(lambda: run.status.state == "running" and run.metrics, lambda: run.status)
    run.stop()
    assert run.wait(90).state == "stopped"
    assert "2 workers on 2 nodes" in capsys.readouterr().out
    assert site.cluster.wait(job_of(site, run)) in ("COMPLETED", "FAILED", "CANCELLED")
    assert site.cluster.restarts(job_of(site, run)) == 0
    step = run.model().step
    again = submit(run.path, train_steps=step + 10)
    assert again.status.state in ("submitted", "running")
    assert again.wait(90).step == step + 10


def test_a_pending_job_is_removed_from_the_queue(site: Site) -> None:
    run = submit(site.folder / "pending", sbatch=["--begin=now+3600"])
    assert run.status == mpitrain.RunStatus("submitted")
    mpitrain.Run(run.path).stop()
    assert run.wait(30).state == "stopped"
    assert site.cluster.wait(job_of(site, run)) == "CANCELLED"


def test_waiting_continues_while_a_job_is_requeued(site: Site) -> None:
    run = submit(site.folder / "requeued", pause=0.05, train_steps=150)
    wait_until(lambda: run.status.state == "running" and run.metrics, lambda: run.status)
    number = job_of(site, run)
    site.cluster.call("scancel", "--batch", "--signal=USR1", number)  # as Slurm does before the time limit
    wait_until(lambda: run.status.state == "stopped", lambda: run.status)
    with pytest.raises(TimeoutError):
        run.wait(3, show=False)
    site.cluster.restart_now(number)
    wait_until(lambda: run.status.state == "running", lambda: run.status)
    run.stop()  # in a later attempt, too
    assert run.wait(90, show=False).state == "stopped"
    assert site.cluster.wait(number) != "PENDING" and site.cluster.restarts(number) == 1


def test_srun_starts_a_loop_of_ones_own(site: Site, openmpi: Mpi) -> None:
    for _ in range(5):
        number = site.script(openmpi, "srun.sbatch", str(ROOT / "jobs" / "trainer_digits.py"), "--epochs", "5")
        state = site.cluster.wait(number)
        log = "".join(path.read_text() for path in site.folder.glob(f"mpitrain-{number}*.log"))
        if not startup_failed(log):
            break
    assert state == "COMPLETED", log
    assert "4 workers on 2 nodes" in log
    assert float(log.split("validation accuracy ")[-1].split()[0]) > 0.8
