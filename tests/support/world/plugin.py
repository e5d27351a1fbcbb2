"""Fixtures of ranks that stay, and tests that run on them.

A test with the mark ``on_ranks(n)`` runs on n ranks, with their communicator as the argument ``comm``::

    @pytest.mark.on_ranks(3)
    def test_sum(comm):
        assert comm.allreduce(comm.rank) == 3

Other tests take a fixture, and let it train, run a program, or call a function on the ranks. How ranks start and end is
tested with processes that mpirun starts.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mpitrain.comm.mpi import MPI

from ...simulators.simulated_gpus import environment_of_gpus
from ..launch import Mpi
from .controller import World


@pytest.fixture(scope="session")
def world(openmpi: Mpi) -> Iterator[World]:
    """Ranks of Open MPI."""
    yield from _of(openmpi)


@pytest.fixture(scope="session")
def mpich_world(mpich: Mpi) -> Iterator[World]:
    """Ranks of MPICH."""
    yield from _of(mpich)


@pytest.fixture(scope="session")
def gpu_world(openmpi: Mpi, library: Path) -> Iterator[World]:
    """Ranks of Open MPI with two simulated GPUs."""
    yield from _of(openmpi, environment_of_gpus(library))


@pytest.fixture(params=["openmpi", "mpich"])
def each_world(request: pytest.FixtureRequest) -> World:
    """Ranks of each MPI library, one after the other."""
    return request.getfixturevalue("world" if request.param == "openmpi" else "mpich_world")  # type: ignore[no-any-return]


def _of(mpi: Mpi, env: Mapping[str, str] | None = None) -> Iterator[World]:
    world = World(mpi, env)
    yield world
    world.close()


@dataclass(frozen=True)
class _OnRanks:
    """Stands for the communicator in the arguments of a test."""

    world: World
    n: int


@pytest.fixture
def comm(request: pytest.FixtureRequest, world: World) -> _OnRanks:
    """The communicator of a test that runs on ranks."""
    mark = request.node.get_closest_marker("on_ranks")
    assert mark is not None, "a test that takes comm needs the mark on_ranks(n)"
    return _OnRanks(world, mark.args[0])


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that takes ``comm`` on the ranks."""
    on_ranks = pyfuncitem.funcargs.get("comm")
    if not isinstance(on_ranks, _OnRanks):
        return None
    names = [name for name in pyfuncitem._fixtureinfo.argnames if name != "comm"]
    values = {name: pyfuncitem.funcargs[name] for name in names}
    mark = pyfuncitem.get_closest_marker("on_ranks")
    assert mark is not None
    function = pyfuncitem.function
    on_ranks.world.call(on_ranks.n, _run, function.__module__, function.__qualname__, values, **mark.kwargs)
    return True


def _run(module: str, name: str, values: dict[str, Any]) -> None:
    """Run a test on this rank."""
    function: Any = sys.modules.get(module) or __import__(module, fromlist=["*"])
    for part in name.split("."):
        function = getattr(function, part)
    function(comm=MPI.COMM_WORLD, **values)
