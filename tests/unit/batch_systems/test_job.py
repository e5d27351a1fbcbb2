"""Batch scripts as a pure function: the options that schedulers receive, and their interpretation by a shell."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from mpitrain.batch_systems.job import Batch, Point
from mpitrain.batch_systems.registry import SYSTEMS
from mpitrain.batch_systems.resources import Resources
from mpitrain.errors import ConfigError
from mpitrain.launcher import bad_hosts
from mpitrain.launcher.batch.request import submit_request
from mpitrain.launcher.batch.submit import make_batch

from ...support.batches import batch, render
from ...support.launch import ROOT

HOSTILE = ["a b", "it's", 'a"b', "$(touch pwned)", "`touch pwned`", "a'; touch pwned #", "a\nb", "a\\b", "*", "-x", "ü"]
HOSTILE += ["a\n'\\b\x7fé"]


def lines(scheduler: str, prefix: str, **changes: object) -> list[str]:
    if scheduler != "slurm":
        changes.setdefault("folder", Path("/w"))
    text = render(scheduler, batch(**changes)).text
    assert text.startswith("#!/bin/bash\n" + prefix)
    return [line.removeprefix(prefix + " ") for line in text.splitlines() if line.startswith(prefix)]


def run_script(made: Batch, scheduler: str, folder: Path, **variables: str) -> list[str]:
    """Return the words that the script executes, with a program in place of Python that records them."""
    program = folder / "python"
    program.write_text('#!/bin/bash\nprintf "%s\\0" "$@" >"$WORDS"\n')
    program.chmod(0o755)
    made = dataclasses.replace(made, python=str(program), folder=folder)
    environment = {**os.environ, "WORDS": str(folder / "words"), **variables}
    text = render(scheduler, made).text
    done = subprocess.run(
        ["bash"], input=text, env=environment, text=True, capture_output=True, timeout=30, check=False
    )
    assert done.returncode == 0, done.stderr
    assert not list(folder.glob("*pwned*"))
    return (folder / "words").read_text().split("\0")[:-1]


@pytest.mark.parametrize("scheduler", SYSTEMS)
@pytest.mark.parametrize("word", HOSTILE)
def test_a_shell_reads_every_word_back(scheduler: str, word: str, tmp_path: Path) -> None:
    resources = Resources(nodes=1)
    made = Batch("n", resources, tmp_path, Path("/r"), "", ["job.py", "--x", word], "mpirun")
    words = run_script(made, scheduler, tmp_path)
    assert words[-5:] == ["--run-dir", "/r", "job.py", "--x", word]


@pytest.mark.parametrize(("scheduler", "prefix"), [("pbs", "#PBS"), ("lsf", "#BSUB"), ("flux", "# flux:")])
def test_no_line_break_adds_a_line_for_the_scheduler(scheduler: str, prefix: str) -> None:
    hostile = f"a\n{prefix} -q evil\r{prefix} -q evil"
    points = [Point("x", (hostile,))] if SYSTEMS[scheduler].index_variable else []
    name = "a" if scheduler == "flux" else hostile  # Flux refuses the name; other systems replace characters
    made = batch(Path("/w"), name=name, arguments=["job.py", hostile], points=points)
    text = render(scheduler, made).text
    found = [line for line in re.split("[\r\n]", text) if line.startswith(prefix)]
    assert len(found) == len(lines(scheduler, prefix, points=points and [Point("x", ())]))
    for given in ({"dependency": hostile}, {"partition": hostile}, {"extra": [hostile]}, {"mail_user": hostile}):
        with pytest.raises(ConfigError):
            render(scheduler, batch(Path("/w"), **given))  # type: ignore[arg-type]


@pytest.mark.parametrize("word", [word for word in HOSTILE if "\\" not in word])
def test_a_hostile_run_directory_is_a_run_directory(word: str, tmp_path: Path) -> None:
    made = Batch("n", Resources(), tmp_path, tmp_path / word, "", ["job.py"], "mpirun")
    assert run_script(made, "slurm", tmp_path)[-3:] == ["--run-dir", str(tmp_path / word), "job.py"]


@pytest.mark.parametrize("name", HOSTILE)
def test_sbatch_reads_every_job_name_unchanged(name: str) -> None:
    made = render("slurm", batch(name=name))
    assert "\n#SBATCH --output" in made.text  # the name adds no line
    if "\n" in name:
        assert made.words == [f"--job-name={name}"]
        (hint,) = (line for line in made.text.splitlines() if line.startswith("# Submit it with "))
        bash = ["bash", "-c", "sbatch() { printf '%s\\0' \"$@\"; }; " + hint.removeprefix("# Submit it with ")]
        output = subprocess.run(bash, capture_output=True, text=True, timeout=30, check=True).stdout
        assert output.split("\0")[:-1] == [*made.words, "/work dir/run/batch/job.sh"]
    else:
        line = next(line for line in made.text.splitlines() if "--job-name" in line)
        # In these names, sbatch interprets double quotes and backslashes like a shell, but does not expand dollar
        # signs.
        assert shlex.split(line.removeprefix("#SBATCH "), posix=True) == [f"--job-name={name}"]
        assert not made.words and "Submit it with" not in made.text


def test_all_options_reach_slurm() -> None:
    options = lines(
        "slurm",
        "#SBATCH",
        nodes=2,
        tasks_per_node=4,
        cpus_per_task=8,
        gres="nic:1",
        gpus_per_node="a100:4",
        mem="16G",
        time="1-02:00:00",
        partition="gpu",
        account="acc",
        qos="high",
        constraint="ib&new",
        dependency="afterok:12",
        mail_type="END,FAIL",
        mail_user="me@here",
        exclusive=True,
        reservation="res",
        requeue=False,
        signal_secs=300,
        array="0-9%2",
        extra=["--nice=10 --comment='two words'"],
    )
    assert options == [
        '--job-name="a job"',
        '--output="/work dir/run/batch/%A_%a.log"',
        "--open-mode=append",
        "--no-requeue",
        "--signal=B:USR1@300",
        "--dependency=afterok:12",
        "--mail-type=END,FAIL",
        "--mail-user=me@here",
        "--array=0-9%2",
        "--nodes=2",
        "--ntasks-per-node=4",
        "--cpus-per-task=8",
        "--mem=16G",
        "--gpus-per-node=a100:4",
        "--gres=nic:1",
        "--constraint=ib&new",
        "--partition=gpu",
        "--account=acc",
        "--qos=high",
        "--time=1-02:00:00",
        "--reservation=res",
        "--exclusive",
        "--nice=10",
        '--comment="two words"',
    ]


def test_spare_hosts_are_more_nodes_of_an_allocation_that_survives_the_loss_of_one(tmp_path: Path) -> None:
    options = lines("slurm", "#SBATCH", nodes=2, tasks_per_node=4, spare_hosts=1, bad_hosts=["n3", "n7"])
    assert {"--nodes=3", "--no-kill", "--ntasks-per-node=4", "--exclude=n3,n7"} <= {*options}
    bad_hosts.record(tmp_path, {"n3": "did not answer"})
    values = {"nodes": 2, "spare_hosts": 1, "run_dir": tmp_path}
    made = make_batch(submit_request(ROOT / "jobs" / "mnist_mlp.py", values), tmp_path, "python")
    assert made.resources.ranks == 2 and made.bad_hosts == ["n3"]
    command = SYSTEMS["slurm"].command(made).split()
    assert command[command.index("--spare-hosts") + 1] == "1" and "--max-restarts" in command


def test_one_rank_a_gpu() -> None:
    assert "--ntasks-per-node=4" in lines("slurm", "#SBATCH", gpus_per_node="a100:4")
    assert "--ntasks-per-node=2" in lines("slurm", "#SBATCH", nodes=2, gpus="4")
    assert "--ntasks-per-node=3" in lines("slurm", "#SBATCH", gpus_per_node="4", tasks_per_node=3)
    # With mpirun, Slurm's tasks are mpirun's daemons, one per node.
    assert "--gpus-per-node=a:6" in lines("slurm", "#SBATCH", gpus_per_task="a:2", tasks_per_node=3)
    assert "--gpus-per-task=a:2" in lines("slurm", "#SBATCH", gpus_per_task="a:2", tasks_per_node=3, starter="srun")


def test_servers_are_the_first_part_of_a_heterogeneous_job() -> None:
    made = batch(
        starter="srun", mpi="pmix", nodes=2, gpus_per_node="2", ps_nodes=1, ps_tasks_per_node=3, ps_partition="cpu"
    )
    text = render("slurm", made).text
    first, second = text.split("#SBATCH hetjob")
    assert "--ntasks-per-node=3" in first and "--partition=cpu" in first and "gpus" not in first
    assert "--gpus-per-node=2" in second and "--ntasks-per-node=2" in second
    assert "--het-group=0,1" in second and "--ps 3 --ps-placement first" in second


def test_srun_receives_the_plugin_and_the_cores() -> None:
    text = render("slurm", batch(starter="srun", mpi="pmi2", cpus_per_task=4)).text
    assert (
        'srun --mpi=pmi2 --wait=60 --cpus-per-task=4 /opt/python -m mpitrain train --run-dir "$run_dir" job.py' in text
    )


def test_pbs_options() -> None:
    options = lines("pbs", "#PBS", nodes=2, tasks_per_node=4, cpus_per_task=2, mem="16G", time="90", partition="q")
    assert options[:5] == [
        "-N a_job",
        "-j oe",
        "-o /w/run/batch/",
        "-l select=2:ncpus=8:mpiprocs=4:mem=16gb",
        "-l walltime=01:30:00",
    ]
    assert "-q q" in options and "-r y" in options
    text = render("pbs", batch(Path("/w"), nodes=2, tasks_per_node=4, time="90")).text
    assert '-n 8 --hostfile "$PBS_NODEFILE" --run-dir "$run_dir" job.py' in text
    assert "MPITRAIN_END_TIME=$(($(date +%s) + 5400))" in text
    assert "qsub /w/run/batch/job.sh" in text


def test_lsf_options() -> None:
    options = lines("lsf", "#BSUB", nodes=2, gpus_per_node="4", time="90", partition="q", account="p")
    assert options == [
        '-J "a_job"',
        "-o /w/run/batch/%J.log",
        "-n 8",
        '-R "span[ptile=4]"',
        '-gpu "num=4:mode=shared"',
        "-W 1:30",
        "-wa USR1",
        "-wt 1",
        "-q q",
        "-P p",
        "-r",
        "-Q 75",
    ]
    points = [Point(name, ()) for name in "abc"]
    assert '-J "a_job[1-3]%2"' in lines("lsf", "#BSUB", points=points, array="%2")


def test_flux_options() -> None:
    options = lines(
        "flux",
        "# flux:",
        nodes=2,
        tasks_per_node=4,
        cpus_per_task=2,
        gpus_per_node="4",
        time="90",
        partition="q",
        account="b",
        constraint="ib&-old",
        dependency="afterok:ƒ58Jk",
        exclusive=True,
        extra=["--urgency=20 --setattr='user.note=two words'"],
    )
    assert options == [
        "--job-name='a job'",
        "--output='/w/run/batch/{{id}}.log'",
        "--nodes=2",
        "--nslots=2",
        "--cores-per-slot=8",
        "--gpus-per-slot=4",
        "--time-limit=5400s",
        "--signal=SIGUSR1@60s",
        "--queue=q",
        "--bank=b",
        "--requires='ib&-old'",
        "--dependency='afterok:ƒ58Jk'",
        "--exclusive",
        "--urgency=20 '--setattr=user.note=two words'",
    ]
    text = render("flux", batch(Path("/w"), nodes=2, tasks_per_node=4, time="90")).text
    assert '-n 8 --hosts "$(flux hostlist --expand --delimiter=, instance)" --run-dir "$run_dir" job.py' in text
    assert "MPITRAIN_END_TIME=$(($(date +%s) + 5400))" in text
    assert "flux --parent batch /w/run/batch/job.sh" in text
    assert "flux --parent" not in render("flux", batch(Path("/w"), requeue=False)).text


@pytest.mark.parametrize("word", [word for word in HOSTILE if "\n" not in word])
def test_flux_reads_every_job_name_unchanged(word: str) -> None:
    (line,) = (line for line in lines("flux", "# flux:", name=word) if line.startswith("--job-name"))
    assert shlex.split(line, comments=True) == [f"--job-name={word}"]


@pytest.mark.parametrize(
    ("scheduler", "variable", "first"),
    [("slurm", "SLURM_ARRAY_TASK_ID", 0), ("pbs", "PBS_ARRAY_INDEX", 0), ("lsf", "LSB_JOBINDEX", 1)],
)
def test_a_task_trains_its_point(scheduler: str, variable: str, first: int, tmp_path: Path) -> None:
    points = [Point("x=1", ("--x=1",)), Point("x=2", ("--x=2", "--y=$(touch pwned)"))]
    made = Batch("n", Resources(), tmp_path, Path("/r"), "", ["job.py"], "mpirun", points)
    words = run_script(made, scheduler, tmp_path, **{variable: str(first + 1)})
    assert words[-5:] == ["--run-dir", "/r/x=2", "job.py", "--x=2", "--y=$(touch pwned)"]


@pytest.mark.parametrize(("seeds", "given"), [(True, ["--seed", "7"]), (False, [])])
def test_a_plain_array_counts_seeds(seeds: bool, given: list[str], tmp_path: Path) -> None:
    made = Batch("n", Resources(array="0-9"), tmp_path, Path("/r"), "", ["job.py"], "mpirun", seeds=seeds)
    words = run_script(made, "slurm", tmp_path, SLURM_ARRAY_TASK_ID="7")
    assert words[words.index("--run-dir") :] == ["--run-dir", "/r/task-7", "job.py", *given]


@pytest.mark.parametrize(
    ("scheduler", "given", "expected"),
    [
        ("slurm", {"folder": Path("/a\\b")}, "--run-dir"),
        ("slurm", {"extra": ["licenses=x"]}, "--licenses"),
        ("slurm", {"extra": ["--comment='x"]}, "--sbatch"),
        ("pbs", {"folder": Path("/a b")}, "#PBS"),
        ("lsf", {"folder": Path("/a b")}, "#BSUB"),
        ("pbs", {"qos": "x"}, "--qos"),
        ("pbs", {"folder": Path("/w"), "extra": ["-l x\nrm"]}, "--sbatch"),
        ("lsf", {"ps_nodes": 1}, "--ps-nodes"),
        ("pbs", {"array": "1,3", "folder": Path("/w")}, "--array 1,3"),
        ("slurm", {"array": "%2"}, "--array %2"),
        *[(name, {"spare_hosts": 1, "folder": Path("/w")}, "--spare-hosts") for name in ("pbs", "lsf", "flux")],
        *[(name, {"bad_hosts": ["n3"], "folder": Path("/w")}, "n3") for name in ("pbs", "lsf", "flux")],
        ("flux", {"array": "0-3"}, "--array"),
        ("flux", {"points": [Point("x", ())]}, "--sweep"),
        ("flux", {"mem": "1G"}, "--mem"),
        ("flux", {"mem_per_cpu": "1G"}, "--mem-per-cpu"),
        ("flux", {"gres": "nic:1"}, "--gres"),
        ("flux", {"qos": "x"}, "--qos"),
        ("flux", {"reservation": "x"}, "--reservation"),
        ("flux", {"mail_type": "END"}, "--mail-type"),
        ("flux", {"mail_user": "me"}, "--mail-user"),
        ("flux", {"ps_nodes": 1}, "--ps-nodes"),
        ("flux", {"gpus_per_node": "a100:4"}, "--gpus-per-node"),
        ("flux", {"folder": Path("/{{id}}")}, "--run-dir"),
        ("flux", {"name": 'a"""b'}, "--job-name"),
        ("flux", {"name": "a\nb"}, "--job-name"),
        ("flux", {"extra": ["--comment='x"]}, "--sbatch"),
    ],
    ids=str,
)
def test_options_that_a_scheduler_does_not_support_are_refused(
    scheduler: str, given: dict[str, object], expected: str
) -> None:
    with pytest.raises(ConfigError, match=expected):
        render(scheduler, batch(**given))  # type: ignore[arg-type]
