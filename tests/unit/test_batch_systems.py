"""Each batch system behind the interface: what registering one provides."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from mpitrain.batch_systems.registry import SYSTEMS, current_job_ids, is_allocation
from mpitrain.errors import LaunchError
from mpitrain.launcher.batch.request import submit_flags
from mpitrain.launcher.batch.scheduler import cancel
from mpitrain.monitor.heartbeat import BatchJob

from ..support.batches import batch
from ..support.launch import ROOT

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
    waiting, running = system.cancel_command("17", running=False), system.cancel_command("17", running=True)
    assert waiting[-1] == running[-1] == "17"


@pytest.mark.parametrize(("environ", "job_ids"), ENVIRONMENTS, ids=str)
def test_the_job_of_a_process(environ: dict[str, str], job_ids: list[str]) -> None:
    assert current_job_ids(environ) == set(job_ids)


def test_the_allocations_that_mpirun_recognizes() -> None:
    assert [is_allocation({name: ""}) for name in ("SLURM_JOB_ID", "PBS_NODEFILE", "LSB_JOBID")] == [True] * 3
    assert not is_allocation({"FLUX_ENCLOSING_ID": "f1", "": ""})


def test_a_job_of_an_unknown_system_is_not_cancelled() -> None:
    with pytest.raises(LaunchError, match="'oar'"):
        cancel(BatchJob("oar", "17", "night"), running=True)
