"""Jobs on a real Slurm cluster: how they start, end and are requeued, and what Slurm refuses."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

import pytest

from ..support.launch import JOBS, ROOT, Mpi, one_line, run
from ..support.results import assert_same_bits, final
from ..support.slurm.site import Site, Submitted, startup_failed
from ..support.waiting import wait_until

SLOW = JOBS / "slow.py"
HOSTILE = "a'; touch pwned #$(touch pwned) `touch pwned`\n\"end"
SCRIPTS = ["single_node", "mpirun", "srun", "servers", "sweep", "preemptible"]
SHORT = ("jobs/mnist_mlp.py", "--train-steps", "30")


def accuracy(log: str) -> float:
    return float(log.split("accuracy ")[-1].split()[0])


def is_running(site: Site, job: Submitted, *nodes: int) -> bool:
    """Return whether one of the nodes has a process of the run."""
    return any(str(job.run_dir) in line for node in nodes for line in site.cluster.processes(node))


def step_of(job: Submitted) -> int:
    """Return the last step that the run has printed, or 0."""
    steps = [line.split()[1] for line in job.log().splitlines() if line.startswith("step ")]
    return int(steps[-1].replace(",", "")) if steps else 0


ON_OWN_NODES = [
    *["--ps-nodes", "1", "--ps-constraint", "f1", "--nodes", "2", "--gpus-per-node", "1", "--time", "5"],
    *[SLOW, "--mode", "async", "--train-steps", "60"],
]


@pytest.fixture(scope="module")
def limited(site: Site, openmpi: Mpi) -> Submitted:
    """A job whose time limit is too short; it takes a minute, in parallel with the other tests."""
    flags = ["--pause", "0.1", "--train-steps", "650", "--log-steps", "50"]
    return site.submit(openmpi, "limited", "--time", "1", "--signal-secs", "0", SLOW, *flags)


@pytest.fixture(scope="module")
def jobs(site: Site, openmpi: Mpi, mpich: Mpi, limited: Submitted) -> dict[str, Submitted]:
    """Independent jobs, submitted at the same time."""
    three = ["--nodes", "3", "--time", "5"]
    steps = ["--train-steps", "60"]
    return {
        "mpirun openmpi": site.submit(openmpi, HOSTILE, *three, "--job-name", HOSTILE, SLOW, *steps),
        "srun openmpi": site.submit(openmpi, "srun-openmpi", *three, "--launcher", "srun", SLOW, *steps),
        "mpirun mpich": site.submit(mpich, "mpirun-mpich", *three, SLOW, *steps),
        "sweep": site.submit(openmpi, "sweep", "--sweep", "learning_rate=0.1,0.01", SLOW, *steps),
        "servers": site.submit(openmpi, "servers", *ON_OWN_NODES),
    }


@pytest.fixture(scope="module")
def scripts(site: Site, openmpi: Mpi, jobs: dict[str, Submitted]) -> dict[str, str]:
    """The numbers of jobs with the unchanged scripts of slurm/, by the name of the script."""
    return {name: site.script(openmpi, f"{name}.sbatch", *SHORT) for name in SCRIPTS}


@pytest.mark.parametrize("how", ["mpirun openmpi", "srun openmpi", "mpirun mpich"])
def test_a_job_trains_on_three_nodes(
    site: Site, openmpi: Mpi, mpich: Mpi, jobs: dict[str, Submitted], how: str
) -> None:
    job = jobs[how]
    if site.cluster.wait(job.number) != "COMPLETED" and startup_failed(job.log()):  # once more
        starter, library = how.split()
        flags = ["--nodes", "3", "--time", "5", "--launcher", starter, SLOW, "--train-steps", "60"]
        job = site.submit(mpich if library == "mpich" else openmpi, f"{starter}-{library}-again", *flags)
    assert site.cluster.wait(job.number) == "COMPLETED", job.log()
    assert "3 workers on 3 nodes" in job.log()
    assert accuracy(job.log()) > 0.3
    assert final(job.run_dir)


def test_hostile_names_do_no_harm(site: Site, jobs: dict[str, Submitted]) -> None:
    job = jobs["mpirun openmpi"]
    site.cluster.wait(job.number)
    assert site.cluster.call("squeue", "-h", "-t", "all", "-j", job.number, "-o", "%j").stdout.rstrip("\n") == HOSTILE
    assert (job.run_dir / "batch" / f"{job.number}.log").is_file()
    assert not [
        path for folder in (ROOT, site.folder, job.run_dir) for path in folder.glob("**/*pwned") if path.is_file()
    ]


def test_a_sweep_is_an_array(site: Site, openmpi: Mpi, jobs: dict[str, Submitted]) -> None:
    job = jobs["sweep"]
    assert site.cluster.wait(job.number) == "COMPLETED", job.log()
    names = sorted(path.name for path in job.run_dir.iterdir())
    assert names == ["batch", "learning_rate=0.01", "learning_rate=0.1"]
    page = job.run_dir / "report.html"
    done = run([str(openmpi.python), "-m", "mpitrain", "report", str(job.run_dir), "-o", str(page)])
    assert done.returncode == 0, done.stderr
    assert all(name in page.read_text() for name in names[1:])


def test_servers_are_on_their_own_nodes(site: Site, openmpi: Mpi, jobs: dict[str, Submitted]) -> None:
    # Slurm 22.05's srun sometimes does not notice that all tasks of a heterogeneous job step have exited ("First task
    # exited 60s ago"), and keeps the nodes until the job's time limit. The job is then submitted again, once.
    job = jobs["servers"]
    with suppress(AssertionError):
        site.cluster.wait(job.number, timeout=75)
    if "First task exited" in job.log():
        site.cluster.call("scancel", job.number)
        job = site.submit(openmpi, "servers-again", *ON_OWN_NODES)
    assert site.cluster.wait(job.number) == "COMPLETED", job.log()
    rows = [line.split() for line in (job.run_dir / "ranks.txt").read_text().splitlines()[1:]]
    assert sorted((row[1], row[2]) for row in rows) == [("n1", "ps"), ("n2", "worker"), ("n3", "worker")]


def test_srun_with_pmi2_trains_with_mpich(site: Site, mpich: Mpi) -> None:
    # Slurm 22.05's plugin sometimes corrupts messages between ranks before MPI has started ("value not properly
    # terminated in client request"). The ranks then fail, or hang.
    flags = ["--nodes", "3", "--time", "2", "--launcher", "srun", SLOW, "--train-steps", "60"]
    for attempt in range(5):
        job = site.submit(mpich, f"srun-mpich-{attempt}", *flags)
        with suppress(AssertionError):
            site.cluster.wait(job.number, timeout=30)
        if site.cluster.state_of(job.number) == "COMPLETED" or "workers" in job.log():
            break
        site.cluster.call("scancel", job.number)
    assert site.cluster.wait(job.number) == "COMPLETED", job.log()
    assert "3 workers on 3 nodes" in job.log()


@pytest.mark.parametrize(("name", "plugin", "advice"), [("openmpi", "pmi2", "pmix"), ("mpich", "pmix", "pmi2")])
def test_the_wrong_plugin_is_refused(
    site: Site, request: pytest.FixtureRequest, name: str, plugin: str, advice: str
) -> None:
    mpi: Mpi = request.getfixturevalue(name)
    flags = ["--nodes", "2", "--launcher", "srun", "--mpi", plugin, SLOW]
    job = site.submit(mpi, f"wrong-{plugin}", *flags)
    assert site.cluster.wait(job.number) == "FAILED", job.log()
    message = one_line(job.log())
    assert f"srun --mpi={advice}" in message
    assert "2 ranks" in message


def test_the_batch_script_of_a_new_project_runs_as_it_stands(site: Site, openmpi: Mpi) -> None:
    project = site.folder / "project"
    done = run([str(openmpi.python), "-m", "mpitrain", "init", str(project)])
    assert done.returncode == 0, done.stderr
    for _ in range(5):
        number = site.script(openmpi, project / "job.sbatch", "--train-steps", "30", cwd=project)
        state = site.cluster.wait(number)
        log = (project / f"job-{number}.log").read_text()
        if state == "COMPLETED" or not startup_failed(log):
            break
    assert state == "COMPLETED", log
    assert "4 workers on 2 nodes" in log
    assert final(project / "runs" / number)


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_to_copy_run_as_they_stand(site: Site, openmpi: Mpi, scripts: dict[str, str], name: str) -> None:
    number = scripts[name]
    for _ in range(5):
        state = site.cluster.wait(number)
        logs = "".join(path.read_text() for path in site.folder.glob(f"mpitrain-{number}*.log"))
        if state == "COMPLETED" or not startup_failed(logs):
            break
        number = site.script(openmpi, f"{name}.sbatch", *SHORT)
    assert state == "COMPLETED", logs
    workers = {"mpirun": 4, "srun": 4, "servers": 4, "preemptible": 4}.get(name, 2)
    assert f"{workers} workers" in logs
    assert logs.count("run directory:") == (4 if name == "sweep" else 1)


def test_preempted_and_resumed_is_never_having_been_preempted(site: Site, openmpi: Mpi, scripts) -> None:
    for number in scripts.values():
        site.cluster.wait(number)  # these jobs would take the nodes first
    nodes = ["--nodes", "2", "--sbatch=--nodelist=n1,n2", "--partition", "low", "--time", "5"]
    flags = ["--train-steps", "250", "--log-steps", "10", "--log-secs", "0"]
    job = site.submit(openmpi, "preempted", *nodes, SLOW, "--pause", "0.1", *flags)  # until it is preempted
    wait_until(lambda: step_of(job) >= 20, job.log)
    taker = ["--partition=high", "--nodelist=n2", "--exclusive", "--output=/dev/null", "--wrap=sleep 1"]
    taken = site.cluster.call("sbatch", "--parsable", *taker)
    site.cluster.restart_now(job.number)
    assert site.cluster.wait(job.number) == "COMPLETED", job.log()
    assert site.cluster.state_of(taken.stdout.strip()) == "COMPLETED"
    log = job.log()
    assert len(re.findall(r" after step [\d,]+.*: (?:SIG|requested)", log)) == 1
    assert log.count("resumed from") == 1
    stopped = int(re.findall(r"at step (\d+) of 250;", log)[0])
    assert 20 <= stopped < 250
    assert (
        log.split("resumed from ")[1].splitlines()[0].endswith(f"at step {stopped}")
    )  # no step is trained twice or lost
    undisturbed = site.submit(openmpi, "undisturbed", *nodes, SLOW, *flags)
    assert site.cluster.wait(undisturbed.number) == "COMPLETED", undisturbed.log()
    assert_same_bits(final(job.run_dir), final(undisturbed.run_dir))


def test_a_node_that_dies_brings_the_job_back(site: Site, openmpi: Mpi, scripts) -> None:
    flags = ["--pause", "0.1", "--train-steps", "120", "--save-steps", "20", "--log-steps", "10", "--log-secs", "0"]
    job = site.submit(openmpi, "crashed", "--nodes", "2", "--sbatch=--nodelist=n2,n3", "--time", "5", SLOW, *flags)
    wait_until(lambda: step_of(job) >= 50, job.log)
    site.cluster.crash_node(3)
    site.cluster.wait(job.number, "PENDING", timeout=90)
    site.cluster.start_node(3)
    wait_until(lambda: not is_running(site, job, 2), "the run ends on n2", 20)
    site.cluster.wait_for_nodes("n2,n3")
    site.cluster.restart_now(job.number)
    assert site.cluster.wait(job.number) == "COMPLETED", job.log()
    assert "resumed from" in job.log()
    assert step_of(job) == 120


def test_scancel_ends_every_process_and_nothing_comes_back(site: Site, openmpi: Mpi) -> None:
    flags = ["--pause", "0.1", "--train-steps", "100000", "--log-steps", "1", "--log-secs", "0"]
    job = site.submit(openmpi, "cancelled", "--nodes", "3", "--time", "5", SLOW, *flags)
    wait_until(lambda: step_of(job) >= 3, job.log)
    assert all(is_running(site, job, node) for node in (1, 2, 3))
    site.cluster.call("scancel", job.number)
    assert site.cluster.wait(job.number) == "CANCELLED"
    wait_until(lambda: not is_running(site, job, 1, 2, 3), "the run ends on all nodes", 20)
    assert site.cluster.state_of(job.number) == "CANCELLED"


def test_a_run_whose_job_ends_before_it_starts_is_listed_with_the_reason(site: Site, openmpi: Mpi) -> None:
    later = ["--sbatch=--begin=now+3600", "--job-name", "night"]
    jobs = [
        site.submit(openmpi, "not-started/one", *later, SLOW),
        site.submit(openmpi, "not-started/array", *later, "--array", "0-1", SLOW),
        site.submit(openmpi, "not-started/starting", "--job-name", "night", "--setup", "sleep 600 & wait $!", SLOW),
    ]
    command = [str(openmpi.python), "-m", "mpitrain", "runs", str(site.folder / "not-started")]

    def states() -> dict[str, str]:
        done = run(command, env=site.environment(openmpi))
        assert done.returncode == 0 and done.stdout.count("night") == 4, done.stdout + done.stderr
        return {line.split()[0]: line for line in done.stdout.splitlines()[1:]}

    numbers = [jobs[0].number, *(f"{jobs[1].number}_{index}" for index in range(2)), jobs[2].number]
    names = ["one", "array/task-0", "array/task-1", "starting"]
    site.cluster.wait(jobs[2].number, "RUNNING")
    found = states()
    assert all(f"submitted (job {number})" in found[name] for name, number in zip(names, numbers, strict=True)), found
    site.cluster.call("scancel", *(job.number for job in jobs))
    for job in jobs:
        site.cluster.wait(job.number)
    found = states()
    assert all(f"(job {number}, CANCELLED)" in found[name] for name, number in zip(names, numbers, strict=True)), found


def test_a_time_limit_is_met_with_a_checkpoint(site: Site, limited: Submitted) -> None:
    site.cluster.restart_now(limited.number, timeout=100)
    assert site.cluster.wait(limited.number) == "COMPLETED", limited.log()
    log = limited.log()
    assert re.search(r" after step [\d,]+ .*time limit", log)
    assert "resumed from" in log
    assert step_of(limited) == 650


def test_a_job_is_followed_to_its_end(site: Site, openmpi: Mpi) -> None:
    flags = ["--follow", "--run-dir", site.folder / "followed", SLOW, "--train-steps", "5"]
    done = site.call(openmpi, *flags)
    assert done.returncode == 0, done.stderr
    assert "1 worker on 1 node" in done.stdout
    assert "is completed" in done.stderr


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--partition", "nope"], ["nope", "sinfo"]),
        (["--nodes", "7"], ["Node count", "sinfo"]),
        (["--gpus-per-node", "5"], ["not available"]),
    ],
    ids=str,
)
def test_what_slurm_refuses_is_one_line(
    site: Site, openmpi: Mpi, flags: list[str], words: list[str], tmp_path: Path
) -> None:
    done = site.call(openmpi, *flags, "--run-dir", tmp_path / "refused", SLOW)
    assert done.returncode == 2
    message = one_line(done.stderr)
    assert all(word in message for word in words), message
    assert not (tmp_path / "refused").exists()
