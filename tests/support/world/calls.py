"""The functions that a rank calls in place of starting a process: a training, and a program."""

from __future__ import annotations

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
from mpitrain.errors import UserError
from mpitrain.monitor.rank_log import show_warnings
from mpitrain.process.rank_status import RankStatusFile
from mpitrain.process.signals import STOPPED_EARLY
from mpitrain.training.session import training_session

from ..launch import ROOT

# Folders of modules that stay imported.
_TESTS = ROOT / "tests"
_KEPT = (sys.prefix, sys.base_prefix, ROOT / "mpitrain", _TESTS / "simulators", _TESTS / "support" / "world")


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
        sys.argv[:] = words
        sys.path.insert(0, str(Path(words[0]).parent))
        try:
            runpy.run_path(words[0], run_name="__main__")
        except SystemExit as error:
            if error.code not in (None, 0):
                raise
        return 0

    return _captured(run, words, place)


def _train(words: Sequence[str]) -> int:
    cluster = Cluster()
    show_warnings(cluster.rank == 0)
    status = RankStatusFile(None, cluster.rank)
    stopped = False
    try:
        with cluster.agree("reading the command line and the job file"):
            request = invoke(train_command(), words)
        with training_session(cluster, request, status) as session:
            if session.loop is not None:
                session.loop.run()
        stopped = session.stopped
        cluster.comm.Barrier()
    except UserError as error:
        if not error.on_all_ranks:
            raise
        if cluster.rank == 0:
            print(f"mpitrain: {error}", file=sys.stderr)
        return error.exit_status
    finally:
        groups = [cluster] if cluster.training is cluster else [cluster.training, cluster]
        for group in groups:
            group.node.Free()
            group.comm.Free()
    return STOPPED_EARLY if stopped else 0


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
    os.environ.update(place.environment)
    sys.path[:0] = [place.folder, *place.environment.get("PYTHONPATH", "").split(os.pathsep)]
    try:
        with contextlib.chdir(place.folder):
            yield
    finally:
        for name in place.environment:
            if name in before:
                os.environ[name] = before[name]
            else:
                os.environ.pop(name, None)
        for name in set(sys.modules) - imported:
            path = getattr(sys.modules[name], "__file__", None)
            if path is not None and not any(map(Path(path).is_relative_to, _KEPT)):
                del sys.modules[name]


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
