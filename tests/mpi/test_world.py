"""Ranks that stay: what tests get from them, and what they report."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import numpy as np
import pytest

from mpitrain.comm.mpi import MPI
from mpitrain.core import words

from ..support.launch import Mpi
from ..support.world.controller import World

pytestmark = pytest.mark.quick


@pytest.mark.on_ranks(3)
@pytest.mark.parametrize("factor", [1, 2])
def test_a_test_runs_on_ranks(comm: MPI.Intracomm, factor: int, tmp_path: Path) -> None:
    assert comm.size == 3 and comm.allreduce(factor * comm.rank) == 3 * factor
    (tmp_path / str(comm.rank)).touch()
    comm.Barrier()
    assert {path.name for path in tmp_path.iterdir()} == {"0", "1", "2"}


def total(value: int) -> tuple[int, int]:
    return MPI.COMM_WORLD.allreduce(value), MPI.COMM_WORLD.rank


def test_a_call_returns_the_result_of_each_rank(each_world: World) -> None:
    for n in (3, 1, 2):
        assert each_world.call(n, total, 5) == [(5 * n, rank) for rank in range(n)]


def changed_state() -> None:
    os.chdir("/")
    np.random.seed(1)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def state() -> tuple[str, float, object]:
    return os.getcwd(), float(np.random.random()), signal.getsignal(signal.SIGUSR1)


def test_the_state_of_the_process_is_restored(world: World) -> None:
    before = world.call(2, state)
    world.call(2, changed_state)
    assert world.call(2, state) == before


@pytest.fixture(scope="module")
def own_world(openmpi: Mpi) -> Iterator[World]:
    """A world that tests may end; the next call starts it again."""
    world = World(openmpi, size=2)
    yield world
    world.close()


def leave_file(path: str) -> None:
    if MPI.COMM_WORLD.rank == 1:
        Path(path).touch()


def leave_shared_memory(path: str) -> None:
    if MPI.COMM_WORLD.rank == 0:
        SharedMemory(Path(path).name, create=True, size=8).close()


def leave_communicator(_: str) -> None:
    MPI.COMM_WORLD.Dup()


def leave_window(_: str) -> None:
    MPI.Win.Allocate(8, comm=MPI.COMM_WORLD)


def leave_variable(name: str) -> None:
    os.environ[Path(name).name] = "1"


def leave_function(_: str) -> None:
    words.one_line = str  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("function", "reported"),
    [
        (leave_file, "rank 1: file {}"),
        (leave_shared_memory, "rank 0: file {}"),
        (leave_communicator, "1 MPI communicators"),
        (leave_window, "1 MPI windows"),
        (leave_variable, "environment variable {name}"),
        (leave_function, "mpitrain.core.words.one_line"),
    ],
)
def test_what_a_test_leaves_behind_is_reported(
    own_world: World, function: Callable[[str], None], reported: str
) -> None:
    path = Path("/dev/shm", f"planted-{os.getpid()}")
    with pytest.raises(pytest.fail.Exception) as failed:
        own_world.call(2, function, str(path))
    path.unlink(missing_ok=True)
    assert reported.format(path, name=path.name) in str(failed.value)
    assert own_world.call(2, total, 1) == [(2, 0), (2, 1)]


def hang() -> None:
    if MPI.COMM_WORLD.rank == 1:
        time.sleep(1000)
    MPI.COMM_WORLD.Barrier()


def die() -> None:
    if MPI.COMM_WORLD.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    MPI.COMM_WORLD.Barrier()


def wrong() -> None:
    assert MPI.COMM_WORLD.allreduce(1) == 2
    if MPI.COMM_WORLD.rank == 1:
        raise ValueError("planted")
    MPI.COMM_WORLD.Barrier()


def local_result() -> object:
    return lambda: None


@pytest.mark.parametrize(
    ("function", "of_rank_1"),
    [(hang, "in hang"), (die, "has ended"), (wrong, "ValueError: planted"), (local_result, "local_result.<locals>")],
)
def test_a_failure_is_reported_by_rank_and_ends_the_world(
    own_world: World, function: Callable[[], object], of_rank_1: str
) -> None:
    with pytest.raises(pytest.fail.Exception) as failed:
        own_world.call(2, function, timeout=5)
    first, second = str(failed.value).partition("--- output")[0].split("--- rank ")[1:]
    assert first.startswith("0") and second.startswith("1") and of_rank_1 in second
    assert own_world.call(2, total, 1) == [(2, 0), (2, 1)]
