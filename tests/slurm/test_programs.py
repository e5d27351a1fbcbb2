"""Programs that do not use mpitrain, as jobs on a real Slurm cluster: they are stopped in time, and resume."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path

import pytest

from ..support.launch import PROGRAMS, Mpi, one_line, run
from ..support.slurm.cluster import ENDED
from ..support.slurm.site import Site, Submitted, startup_failed
from ..support.waiting import limit, wait_until

LAUNCHERS, BACKENDS = ("mpirun", "srun"), ("gloo", "mpitrain")
STEPS = 300  # 15 s, as long as the first part of a run with a time limit
PREEMPTED_STEPS = 160


@pytest.fixture(scope="module")
def limited(site: Site, openmpi: Mpi) -> dict[str, Submitted]:
    """Jobs with a limit of one minute that get SIGTERM 45 s before it, by their reaction to this signal."""
    flags = ["--time", "1", "--stop-secs", "45"]
    return {
        "save": submit_resuming(site, openmpi, "limited", "save", "mpirun", *flags),
        "die": submit_resuming(site, openmpi, "limited", "die", "srun", *flags),
    }


@pytest.fixture(scope="module")
def summing(site: Site, openmpi: Mpi, unstartable: Submitted) -> dict[str, Submitted]:
    """Jobs that sum over three nodes, with each launcher and each backend."""
    ways = itertools.product(LAUNCHERS, BACKENDS)
    return {f"{starter}-{backend}": submit_summing(site, openmpi, starter, backend) for starter, backend in ways}


@pytest.fixture(scope="module")
def unstartable(site: Site, openmpi: Mpi, limited: dict[str, Submitted]) -> Submitted:
    """A job whose first job step srun cannot start, because a node still has a folder for this job step."""
    words = ["--launcher", "srun", "--nodes", "1", "--time", "5", "--sbatch=--hold", "--sbatch=--nodelist=n3"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BASH_FUNC_sleep%%", "() { :; }")  # the script would wait for network file systems
        job = site.submit(openmpi, "unstartable", *words, "--", "true")
    (site.cluster.state / "spool" / "n3" / f"pmix.{job.number}.0").mkdir()
    site.cluster.call("scontrol", "release", job.number)
    return job


def has_saved(folder: Path) -> bool:
    """Return whether all ranks of a program have saved a step: they have met before."""
    return 0 < len([*folder.glob("starts-?")]) == len([*folder.glob("step-?")])


def submit_summing(site: Site, mpi: Mpi, starter: str, backend: str) -> Submitted:
    folder = site.folder / f"sums-{starter}-{backend}"
    folder.mkdir(exist_ok=True)
    flags = ["--nodes", "3", "--tasks-per-node", "2", "--time", "5", "--launcher", starter]
    words = ["--", "python", PROGRAMS / "summing.py", folder, backend]
    return site.submit(mpi, f"summing-{starter}-{backend}", *flags, *words)


def submit_resuming(
    site: Site, mpi: Mpi, name: str, ending: str, launcher: str, *flags: str, steps: int = STEPS
) -> Submitted:
    """Submit a program that can resume, on two nodes unless ``flags`` has ``--nodes``.

    Args:
        ending: Reaction of the program to SIGTERM.
    """
    nodes = ["--nodes", "2"] if "--nodes" not in flags else []
    words = ["--launcher", launcher, "--", "python", PROGRAMS / "resuming.py", steps_of(site, name, ending)]
    return site.submit(mpi, f"{name}-{ending}", *nodes, *flags, *words, str(steps), ending)


def steps_of(site: Site, name: str, ending: str) -> Path:
    """Return the folder of a program's checkpoints."""
    return site.folder / f"{name}-{ending}-steps"


def assert_resumes(site: Site, job: Submitted, folder: Path, steps: int = STEPS) -> None:
    """Check that a job that has been requeued finishes, and that its ranks resume from steps that they have saved."""

    def has_ended() -> bool:
        state = site.cluster.state_of(job.number)
        if state == "PENDING":  # the job was asked to stop a second time
            site.cluster.restart_now(job.number)
        return state in ENDED

    site.cluster.restart_now(job.number)
    wait_until(has_ended, job.log, 90, poll_s=0.1)
    assert site.cluster.state_of(job.number) == "COMPLETED", job.log()
    assert "mpitrain: requeueing the job" in job.log()
    for checkpoint in folder.glob("step-*"):
        starts = [int(line) for line in (folder / checkpoint.name.replace("step", "starts")).read_text().split()]
        assert starts[0] == 0 < starts[1] and starts == sorted(starts)
        assert int(checkpoint.read_text()) == steps


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("starter", LAUNCHERS)
def test_a_program_sums_over_three_nodes(
    site: Site, openmpi: Mpi, summing: dict[str, Submitted], starter: str, backend: str
) -> None:
    job = summing[f"{starter}-{backend}"]
    for _ in range(5):
        state = site.cluster.wait(job.number)
        if state == "COMPLETED" or not startup_failed(job.log()):
            break
        job = submit_summing(site, openmpi, starter, backend)
    assert state == "COMPLETED", job.log()
    folder = site.folder / f"sums-{starter}-{backend}"
    found = [json.loads((folder / f"sum-{rank}.json").read_text()) for rank in range(6)]
    assert {record["sum"] for record in found} == {21.0}
    assert {record["MASTER_ADDR"] for record in found} == {f"{site.cluster.net}.1"}
    for rank, record in enumerate(found):
        assert (record["RANK"], record["WORLD_SIZE"], record["LOCAL_WORLD_SIZE"]) == (str(rank), "6", "2")
        assert (record["LOCAL_RANK"], record["GROUP_RANK"], record["GROUP_WORLD_SIZE"]) == (
            str(rank % 2),
            str(rank // 2),
            "3",
        )
        assert record["host"] == f"n{rank // 2 + 1}"


def test_preempted_programs_resume(site: Site, openmpi: Mpi, summing: dict[str, Submitted]) -> None:
    for job in summing.values():
        site.cluster.wait(job.number)  # these jobs would take the nodes first
    low = ["--partition", "low", "--time", "5"]
    steps = PREEMPTED_STEPS
    two, one = ["--sbatch=--nodelist=n1,n2"], ["--nodes", "1", "--sbatch=--nodelist=n3"]
    jobs = {
        "save": submit_resuming(site, openmpi, "preempted", "save", "srun", *low, *two, steps=steps),
        "die": submit_resuming(site, openmpi, "preempted", "die", "mpirun", *low, *one, steps=steps),
    }
    folders = {ending: steps_of(site, "preempted", ending) for ending in jobs}
    wait_until(lambda: all(map(has_saved, folders.values())), "both programs have saved a step")
    taker = ["--partition=high", "--nodes=3", "--exclusive", "--output=/dev/null", "--wrap=sleep 1"]
    taken = site.cluster.call("sbatch", "--parsable", *taker)
    for ending, job in jobs.items():
        assert_resumes(site, job, folders[ending], steps)
    assert site.cluster.state_of(taken.stdout.strip()) == "COMPLETED"


@pytest.mark.parametrize("ending", ["save", "die"])
def test_programs_are_requeued_before_their_time_limit(site: Site, limited: dict[str, Submitted], ending: str) -> None:
    assert_resumes(site, limited[ending], steps_of(site, "limited", ending))


def test_a_step_that_srun_could_not_start_is_started_again(site: Site, unstartable: Submitted) -> None:
    assert site.cluster.wait(unstartable.number) == "COMPLETED", unstartable.log()
    assert "launch failed" in unstartable.log()
    assert json.loads((unstartable.run_dir / "status.json").read_text())["state"] == "finished"


def test_more_ranks_than_tasks_on_one_node(site: Site, mpi: Mpi) -> None:
    folder = site.folder / f"more-{mpi.name}"
    folder.mkdir()
    words = ["--ntasks=1", "--cpus-per-task=2", f"--output={folder}/log"]
    command = f"{mpi.python} -m mpitrain run -n {{}} --run-dir {folder}/{{}} -- echo here"
    inner = f"srun --overlap {command.format(2, 'inner')}"  # an editor is often a job step itself
    script = "; echo status $?; ".join([command.format(2, "two"), inner, command.format(9, "nine")])
    done = run(["sbatch", "--parsable", *words, "--wrap", script], env=site.environment(mpi), cwd=folder)
    job = done.stdout.strip()
    site.cluster.wait(job)
    lines = (folder / "log").read_text().splitlines()
    assert sorted(lines[:3]) == ["here", "rank 1: here", "status 0"]
    assert sorted(lines[3:6]) == ["here", "rank 1: here", "status 0"]
    if mpi.name == "openmpi":
        (refused,) = lines[6:]
        assert "--ntasks 9" in refused


def test_a_job_that_has_ended(site: Site, openmpi: Mpi) -> None:
    words = ["sbatch", "--parsable", "--output=/dev/null", "--wrap", "env > variables"]
    site.cluster.wait(run(words, env=site.environment(openmpi), cwd=site.folder).stdout.strip())
    variables = dict(line.partition("=")[::2] for line in (site.folder / "variables").read_text().splitlines())
    stale = {name: value for name, value in variables.items() if name.startswith("SLURM_")}
    began = time.monotonic()
    start = [str(openmpi.python), "-m", "mpitrain", "run", "-n", "1", "--run-dir", str(site.folder / "stale")]
    done = run([*start, "--", "true"], env={**site.environment(openmpi), **stale})
    assert done.returncode == 2 and "SLURM_JOB_ID" in one_line(done.stderr)
    assert time.monotonic() - began < limit(5)


def test_doctor_checks_nodes(site: Site, openmpi: Mpi) -> None:
    words = [
        str(openmpi.python),
        "-m",
        "mpitrain",
        "doctor",
        "--nodes",
        "3",
        "--json",
        "--run-dir",
        str(site.folder / "d"),
    ]
    findings = json.loads(run(words, env=site.environment(openmpi), cwd=site.folder, timeout=150).stdout)
    hosts = {each["check"] for each in findings if each["topic"] == "Ranks" and each["check"].startswith("host ")}
    assert hosts == {"host n1", "host n2", "host n3"}


@pytest.mark.parametrize("starter", LAUNCHERS)
def test_ranks_see_what_the_setup_has_set(site: Site, mpi: Mpi, starter: str) -> None:
    flags = [
        "--nodes",
        "2",
        "--launcher",
        starter,
        "--sbatch=--export=NONE",
        "--setup",
        f"export PATH={mpi.python.parent}:$PATH",
    ]
    flags += ["--setup", "export FROM_SETUP=seen", "--", "bash", "-c", "echo $RANK is $FROM_SETUP"]
    job = site.submit(mpi, f"setup-{mpi.name}-{starter}", *flags)
    assert site.cluster.wait(job.number) == "COMPLETED", job.log()
    assert {"0 is seen", "rank 1: 1 is seen"} <= set(job.log().splitlines())
