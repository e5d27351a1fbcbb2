"""The functions of the interface of batch systems, for each registered batch system."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import click
import pytest

from mpitrain.batch_systems.base import JobState
from mpitrain.batch_systems.registry import SYSTEMS, allocation, current_job_ids
from mpitrain.batch_systems.resources import Resources
from mpitrain.errors import ConfigError, LaunchError
from mpitrain.launcher.batch import scheduler
from mpitrain.launcher.batch.request import submit_flags
from mpitrain.launcher.batch.scheduler import cancel
from mpitrain.monitor.heartbeat import BatchJob

from ...support.batches import batch
from ...support.launch import ROOT

ENVIRONMENTS = [
    ({"SLURM_JOB_ID": "7"}, ["7"]),
    ({"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "8", "SLURM_ARRAY_TASK_ID": "1"}, ["9", "8_1"]),
    ({"PBS_JOBID": "7.server"}, ["7.server"]),
    ({"LSB_JOBID": "7"}, ["7"]),
    ({"FLUX_ENCLOSING_ID": "ƒ7Z"}, ["ƒ7Z", "f7Z"]),
    ({}, []),
]


def test_every_system_is_a_choice_and_slurm_the_default() -> None:
    (option,) = (option for option in submit_flags() if option.name == "scheduler")
    assert isinstance(option.type, click.Choice)
    assert list(option.type.choices) == [*SYSTEMS]
    assert option.default == "slurm"


def test_only_the_modules_of_the_systems_compare_their_names() -> None:
    names = "|".join(SYSTEMS)
    compared = re.compile(rf"""scheduler.*(==|!=|\bin \().*["']({names})["']|["']({names})["'] *:""")
    own = {ROOT / "mpitrain" / "batch_systems" / f"{name}.py" for name in SYSTEMS}
    files = [path for path in (ROOT / "mpitrain").rglob("*.py") if path not in own]
    assert [path for path in files if compared.search(path.read_text(encoding="utf-8"))] == []


@pytest.mark.parametrize("name", SYSTEMS)
def test_what_a_system_says_about_itself_is_consistent(name: str) -> None:
    system = SYSTEMS[name]
    made = batch(Path("/w"), nodes=2)
    assert system.name == name
    assert bool(system.node_check) == bool(system.restart_count_variable)
    assert system.directives(made).lines
    assert "mpitrain run" in system.command(made)
    flagged = replace(made, launch_flags=["--stage-env", "/tmp"])
    assert "--stage-env /tmp" in system.command(flagged)
    system.check(flagged)
    with pytest.raises(ConfigError, match="--stage-env"):
        system.check(replace(flagged, starter="srun"))
    waiting, running = system.cancel_command("17", running=False), system.cancel_command("17", running=True)
    assert waiting[-1] == running[-1] == "17"


def test_only_the_modules_of_the_systems_name_starters_and_states() -> None:
    starters = {starter for system in SYSTEMS.values() for starter in system.starters}
    words = re.compile("|".join(f'[=!]= "{word}"' for word in (*starters, "PENDING", "COMPLETED", "COMPLETING")))
    files = (ROOT / "mpitrain" / "launcher" / "batch").glob("*.py")
    assert [path for path in files if words.search(path.read_text(encoding="utf-8"))] == []


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_system_chooses_one_of_its_starters(name: str) -> None:
    system = SYSTEMS[name]
    assert system.choose_starter(None, Resources()) == "mpirun"
    for starter in system.starters:
        assert system.choose_starter(starter, Resources()) == starter
    with pytest.raises(ConfigError, match=f"--launcher prun .*--scheduler {name}"):
        system.choose_starter("prun", Resources())


def test_srun_starts_a_heterogeneous_job() -> None:
    slurm, resources = SYSTEMS["slurm"], Resources(ps_nodes=1)
    assert slurm.choose_starter(None, resources) == slurm.choose_starter("srun", resources) == "srun"
    with pytest.raises(ConfigError, match=r"--launcher mpirun .*--ps-nodes"):
        slurm.choose_starter("mpirun", resources)


def test_only_srun_has_an_mpi_plugin() -> None:
    def not_asked() -> str:
        raise AssertionError("the library was loaded")

    assert [system.mpi_plugin("mpirun", None, not_asked) for system in SYSTEMS.values()] == [""] * len(SYSTEMS)
    assert SYSTEMS["slurm"].mpi_plugin("srun", None, lambda: "openmpi") == "pmix"
    assert SYSTEMS["slurm"].mpi_plugin("srun", None, lambda: "mpich") == "pmi2"
    assert SYSTEMS["slurm"].mpi_plugin("srun", None, lambda: "intel") == "pmi2"
    assert SYSTEMS["slurm"].mpi_plugin("srun", "cray", not_asked) == "cray"
    for system in SYSTEMS.values():
        with pytest.raises(ConfigError, match="--mpi pmix"):
            system.mpi_plugin("mpirun", "pmix", not_asked)


class Scripted(type(SYSTEMS["slurm"])):  # type: ignore[misc]
    """Slurm that answers with the given states, one after another; None means that it does not know the job."""

    def __init__(self, *answers: JobState | None) -> None:
        self.answers = list(answers)

    def states(self, job_ids: Iterable[str]) -> dict[str, JobState]:
        state = self.answers.pop(0)
        return {} if state is None else dict.fromkeys(job_ids, state)


@pytest.mark.parametrize(
    ("last", "succeeded"),
    [(JobState("FINE", has_ended=True, succeeded=True), True), (JobState("BAD", has_ended=True), False)],
    ids=["succeeded", "failed"],
)
def test_a_job_is_followed_by_its_states(
    last: JobState, succeeded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(scheduler, "_POLL_S", 0.0)
    running, cleaning_up = JobState("BUSY", has_ended=False), JobState("CLEAN", has_ended=False, is_cleaning_up=True)
    system = Scripted(None, running, running, None, cleaning_up, last)
    assert scheduler.follow(system, "7", tmp_path / "no log") == succeeded
    assert capsys.readouterr().err.splitlines() == [
        "mpitrain: job 7 is busy",
        f"mpitrain: job 7 is {last.name.lower()}",
    ]


@pytest.mark.parametrize(("environ", "job_ids"), ENVIRONMENTS, ids=str)
def test_the_job_of_a_process(environ: dict[str, str], job_ids: list[str]) -> None:
    assert current_job_ids(environ) == set(job_ids)


def test_the_allocations_that_mpirun_recognizes() -> None:
    found = [allocation({name: ""}) for name in ("SLURM_JOB_ID", "PBS_NODEFILE", "LSB_JOBID")]
    assert found == [SYSTEMS[name] for name in ("slurm", "pbs", "lsf")]
    assert allocation({"FLUX_ENCLOSING_ID": "f1", "": ""}) is None


def test_a_job_of_an_unknown_system_is_not_cancelled() -> None:
    with pytest.raises(LaunchError, match="'oar'"):
        cancel(BatchJob("oar", "17", "night"), running=True)
