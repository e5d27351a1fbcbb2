"""An allocation that stays when a node fails (``--no-kill``): the run continues on the other nodes."""

from __future__ import annotations

import json
from pathlib import Path

from mpitrain.launcher import bad_hosts

from ..support.launch import JOBS, Mpi
from ..support.slurm.site import Site
from ..support.waiting import wait_until

SBATCH = ["--nodes=3", "--ntasks-per-node=2", "--time=5", "--no-kill"]
RUN = ["--max-restarts", "1", "--min-ranks", "4", "--link-timeout", "5"]
JOB = [str(JOBS / "slow.py"), "--train-steps", "300", "--pause", "0.05", "--log-steps", "10", "--save-steps", "50"]


def wait_until_it_trains(run_dir: Path, output: Path) -> None:
    metrics = run_dir / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and '"step": 60' in metrics.read_text(), output.read_text, 90)


def test_a_run_continues_without_a_failed_node(site: Site, mpi: Mpi) -> None:
    number = site.script(mpi, "preemptible.sbatch", *RUN, *JOB, flags=SBATCH)
    run_dir, output = site.folder / "runs" / f"slurm-{number}", site.folder / f"mpitrain-{number}.log"
    metrics = run_dir / "metrics.jsonl"
    wait_until_it_trains(run_dir, output)
    site.cluster.crash_node(3)
    try:
        state = site.cluster.wait(number, timeout=120)
        log = output.read_text()
        assert state == "COMPLETED", log
        status = json.loads((run_dir / "status.json").read_text())
        assert (status["step"], status["ranks"]) == (300, "4 workers"), log
        resumed = [line for line in map(json.loads, metrics.read_text().splitlines()) if "resumed" in line]
        assert len(resumed) == 1 and resumed[0]["resumed"] > 0
        assert not any(run_dir.name in line for node in (1, 2) for line in site.cluster.processes(node))
    finally:
        site.cluster.start_node(3)
        site.cluster.wait_for_nodes("n3")


def test_a_job_is_requeued_if_its_run_fails_with_a_node(site: Site, openmpi: Mpi) -> None:
    """With ``--no-kill``, Slurm itself does not requeue the job. The run fails, because too few ranks are left."""
    words = ["--max-restarts", "1", "--min-ranks", "6", "--link-timeout", "5", *JOB]
    number = site.script(openmpi, "preemptible.sbatch", *words, flags=SBATCH)
    run_dir, output = site.folder / "runs" / f"slurm-{number}", site.folder / f"mpitrain-{number}.log"
    wait_until_it_trains(run_dir, output)
    site.cluster.crash_node(3)
    try:
        site.cluster.wait(number, "PENDING", timeout=120)
    finally:
        site.cluster.start_node(3)
        site.cluster.wait_for_nodes("n3")
    site.cluster.restart_now(number)
    assert site.cluster.wait(number, timeout=120) == "COMPLETED", output.read_text()
    status = json.loads((run_dir / "status.json").read_text())
    assert (status["step"], status["ranks"]) == (300, "6 workers"), output.read_text()
    assert "resumed from" in output.read_text()


def test_a_spare_node_replaces_a_failed_one_and_the_next_job_leaves_it_out(site: Site, openmpi: Mpi) -> None:
    job = site.submit(
        openmpi, "spare", "--nodes", "2", "--tasks-per-node", "2", "--spare-hosts", "1", "--time", "5", *JOB
    )
    wait_until_it_trains(job.run_dir, job.run_dir / "batch" / f"{job.number}.log")
    site.cluster.crash_node(2)
    try:
        assert site.cluster.wait(job.number, timeout=120) == "COMPLETED", job.log()
        assert hosts_of(job.run_dir) == ["n1", "n1", "n3", "n3"]
        assert list(bad_hosts.read(job.run_dir)) == ["n2"]
    finally:
        site.cluster.start_node(2)
        site.cluster.wait_for_nodes("n2")
    words = ["--nodes", "2", "--tasks-per-node", "2", "--time", "5", *JOB, "--train-steps", "310"]
    again = site.submit(openmpi, "spare", *words)
    assert site.cluster.wait(again.number, timeout=120) == "COMPLETED", again.log()
    assert hosts_of(job.run_dir) == ["n1", "n1", "n3", "n3"]


def hosts_of(run_dir: Path) -> list[str]:
    return [line.split()[1] for line in (run_dir / "ranks.txt").read_text().splitlines()[1:]]
