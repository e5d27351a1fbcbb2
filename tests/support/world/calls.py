"""The functions that a rank calls in place of starting a process: a training, and a program."""

from __future__ import annotations

import atexit
import contextlib
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mpitrain.cli.job_command import train_command
from mpitrain.cli.main import invoke
from mpitrain.comm.cluster import Cluster
from mpitrain.comm.mpi import MPI
from mpitrain.errors import UserError
from mpitrain.monitor.rank_log import show_warnings
from mpitrain.plan.script import ScriptRequest
from mpitrain.process.launcher_env import RANK
from mpitrain.process.rank_status import RankStatusFile
from mpitrain.process.signals import STOPPED_EARLY
from mpitrain.training.script_rank import ScriptRank
from mpitrain.training.session import training_session

from ..launch import ROOT

# Folders of modules that stay imported.
_TESTS = ROOT / "tests"
_PACKAGES = [path for path in sys.path if Path(path).name == "site-packages"]  # also of another environment
_KEPT = (
    *_PACKAGES,
    sys.prefix,
    sys.base_prefix,
    ROOT / "mpitrain",
    _TESTS / "simulators",
    _TESTS / "support" / "world",
)


@dataclass(frozen=True)
class Place:
    """The working directory of a call, and its additional environment variables.

    As at the start of a process, PYTHONPATH is read, and folders of programs and jobs are in the import path.
    """

    folder: str
    environment: Mapping[str, str]


def train(words: Sequence[str], place: Place) -> subprocess.CompletedProcess[str]:
    """Do what ``mpitrain train WORDS`` does on this rank, up to the exit. Collective over all ranks.

    A user's error that all ranks have is printed by rank 0; other exceptions are raised.
    """
    return _captured(lambda: _train(words), ["mpitrain", "train", *words], place)


def program(words: Sequence[str], place: Place) -> subprocess.CompletedProcess[str]:
    """Run a Python file, with its arguments, as the main program."""

    def run() -> int:
        _run_file(words)
        return 0

    return _captured(run, words, place)


def _train(words: Sequence[str]) -> int:
    command = train_command()
    if command.script_in(words) is not None:
        return _run_script(invoke(command, words))
    cluster = Cluster()
    show_warnings(cluster.rank == 0)
    status = RankStatusFile(None, cluster.rank)
    try:
        with cluster.agree("reading the command line and the job file"):
            request = invoke(command, words)
        with training_session(cluster, request, status) as session:
            if session.loop is not None:
                session.loop.run()
        cluster.comm.Barrier()
        return STOPPED_EARLY if session.stopped else 0
    except UserError as error:
        return _exit_status(error, cluster.rank)
    finally:
        _free(cluster)


def _run_script(request: ScriptRequest) -> int:
    rank = ScriptRank(forks=False)
    rank.options = request.options
    try:
        try:
            _run_file([str(request.path), *request.arguments])
        except UserError as error:
            error.on_all_ranks = True  # a rank without it does not end, so the call fails
            rank.fail(error)  # exits
        assert rank.session is None, "the script has not finished its training"
        return 0
    except SystemExit as ended:
        return int(ended.code)  # type: ignore[arg-type]
    finally:
        atexit.unregister(rank._check_exit)
        ScriptRank._of_process = None
        os.environ.pop(RANK, None)
        if rank._cluster is not None:
            _free(rank._cluster)


def _run_file(words: Sequence[str]) -> None:
    """Run a Python file with arguments as the main program."""
    sys.argv[:] = words
    sys.path.insert(0, str(Path(words[0]).parent.absolute()))
    try:
        runpy.run_path(words[0], run_name="__main__")
    except SystemExit as error:
        if error.code not in (None, 0):
            raise


def _exit_status(error: UserError, rank: int) -> int:
    """Print an error that all ranks have once; return their exit status."""
    if not error.on_all_ranks:
        raise error
    if rank == 0:
        print(f"mpitrain: {error}", file=sys.stderr)
    return error.exit_status


def _free(cluster: Cluster) -> None:
    for group in [cluster] if cluster.training is cluster else [cluster.training, cluster]:
        group.node.Free()
        group.comm.Free()


def _captured(function: Callable[[], int], words: Sequence[str], place: Place) -> subprocess.CompletedProcess[str]:
    """Call a function; return its exit status and what this process has written, also from C."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        with _at(place), _redirected(1, out.fileno()), _redirected(2, err.fileno()):
            status = function()
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(words, status, out.read(), err.read())


@contextlib.contextmanager
def _at(place: Place) -> Iterator[None]:
    """Work at a place; afterwards forget the modules imported there, since other places have others of these names."""
    before, imported = dict(os.environ), set(sys.modules)
    os.environ.update(_of_launcher() | dict(place.environment))
    sys.path[:0] = [place.folder, *place.environment.get("PYTHONPATH", "").split(os.pathsep)]
    try:
        with contextlib.chdir(place.folder):
            yield
    finally:
        for name in {*_of_launcher(), *place.environment}:
            if name in before:
                os.environ[name] = before[name]
            else:
                os.environ.pop(name, None)
        for name in set(sys.modules) - imported:
            path = getattr(sys.modules[name], "__file__", None)
            if path is not None and not any(map(Path(path).is_relative_to, _KEPT)):
                del sys.modules[name]


def _of_launcher() -> dict[str, str]:
    """Return the variables with which mpirun would start this rank."""
    is_openmpi = MPI.Get_library_version().startswith("Open MPI")
    of_rank = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK") if is_openmpi else ("PMI_RANK", "MPI_LOCALRANKID")
    of_size = ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE") if is_openmpi else ("PMI_SIZE", "MPI_LOCALNRANKS")
    comm = MPI.COMM_WORLD
    return dict.fromkeys(of_rank, str(comm.rank)) | dict.fromkeys(of_size, str(comm.size))


@contextlib.contextmanager
def _redirected(descriptor: int, target: int) -> Iterator[None]:
    stream = sys.stdout if descriptor == 1 else sys.stderr
    stream.flush()
    kept = os.dup(descriptor)
    os.dup2(target, descriptor)
    try:
        yield
    finally:
        stream.flush()
        os.dup2(kept, descriptor)
        os.close(kept)
