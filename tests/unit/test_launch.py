"""The launcher's command line, as a pure function."""

from __future__ import annotations

import shlex
import sys

import pytest

from mpitrain.errors import LaunchError
from mpitrain.launch.mpirun import Launcher, compose
from mpitrain.mpi import check_launcher

OPEN, MPICH, INTEL = (Launcher(make, "/opt/mpirun") for make in ("openmpi", "mpich", "intel"))
RANK = [sys.executable, "-m", "mpitrain", "train", "a job.py"]


def words(launcher: Launcher, ranks: int, cores: int, hosts: str | None = None) -> list[str]:
    command = compose(launcher, ranks, hosts, cores, root=False, environ={"PATH": "/bin"}, arguments=["a job.py"])
    assert command.words[-len(RANK) :] == RANK
    return command.words[: -len(RANK)]


def test_cores_are_shared_among_ranks() -> None:
    assert words(OPEN, 2, 16) == ["/opt/mpirun", "-n", "2", "--map-by", "slot:PE=8", "--bind-to", "core"]
    assert words(MPICH, 3, 16) == ["/opt/mpirun", "-n", "3", "-bind-to", "core:5"]
    assert words(INTEL, 2, 16) == ["/opt/mpirun", "-n", "2"]


def test_more_ranks_than_cores_are_not_bound() -> None:
    assert words(OPEN, 5, 4) == ["/opt/mpirun", "-n", "5", "--oversubscribe", "--bind-to", "none"]
    assert words(MPICH, 5, 4) == ["/opt/mpirun", "-n", "5"]


def test_hosts() -> None:
    assert words(OPEN, 8, 4, "a:4,b:4")[3:] == ["--host", "a:4,b:4", "--bind-to", "none"]
    assert words(MPICH, 8, 4, "a:4,b:4")[3:] == ["-hosts", "a:4,b:4"]


def test_root_is_allowed_only_where_it_is_root() -> None:
    for root in (True, False):
        command = compose(OPEN, 1, None, 1, root=root, environ={}, arguments=[])
        assert ("OMPI_ALLOW_RUN_AS_ROOT" in command.environment) == root


def test_what_the_user_has_set_is_left_alone() -> None:
    def environment(launcher: Launcher, **environ: str) -> dict[str, str]:
        return compose(launcher, 9, None, 1, root=True, environ=environ, arguments=[]).environment

    assert environment(OPEN)["OMPI_MCA_osc"] == "^ucx"
    assert "OMPI_MCA_osc" not in environment(OPEN, OMPI_MCA_osc="rdma")
    assert environment(INTEL, PATH="/bin")["PATH"] == "/opt:/bin"
    assert "PATH" not in environment(INTEL, PATH="/bin:/opt")


def test_the_printed_command_can_be_pasted() -> None:
    command = compose(
        OPEN, 1, None, 1, root=False, environ={"PATH": "/bin"}, arguments=["it's $(here).py", "--x", "a b"]
    )
    assert shlex.split(str(command))[-3:] == ["it's $(here).py", "--x", "a b"]


@pytest.mark.parametrize("variable", ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MPI_LOCALNRANKS", "SLURM_STEP_NUM_TASKS"])
def test_singletons_of_another_launcher_are_refused(variable: str) -> None:
    check_launcher({variable: "1"}, 1)
    check_launcher({variable: "4"}, 4)
    check_launcher({}, 1)
    with pytest.raises(LaunchError, match="4 ranks"):
        check_launcher({variable: "4"}, 1)
