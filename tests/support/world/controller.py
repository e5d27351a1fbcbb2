"""Starts a world of ranks, calls functions on them, and ends the world after a failure."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import Any

import pytest

from mpitrain.plan.script import is_script

from ..launch import LAUNCHER_ENVIRONMENT, ROOT, Mpi, forget_session, one_line, with_checkout
from ..waiting import limit, wait_until
from . import calls
from .messages import STACKS_SIGNAL, Failed, Returned, Task

_START_S = limit(60.0)
_GRACE_S = limit(2.0)  # for the other ranks, after one has failed
_STACKS_S = 2.0


class World:
    """Ranks of an MPI library, which call functions until one of the calls fails.

    A function that raises, hangs, or ends its process ends the world, and fails the test with the traceback of each
    rank; the next call starts a new world. Ranks without a call wait on their connection, without using the CPU.

    Args:
        env: Additional environment variables of the ranks.
        python: Their interpreter.
        modules: What they import at their start, since it changes what other modules define.
    """

    def __init__(
        self,
        mpi: Mpi,
        env: Mapping[str, str] | None = None,
        size: int = 6,
        python: Path | None = None,
        modules: Sequence[str] = (),
    ) -> None:
        self._mpi, self._environment, self._size, self._python = mpi, env or {}, size, python or mpi.python
        self._modules = modules
        self._folder = tempfile.TemporaryDirectory(prefix="world-")
        self._process: subprocess.Popen[bytes] | None = None
        self._connections: list[Connection] = []
        self._pids: list[int] = []

    def call(
        self, n: int, function: Callable[..., Any], *arguments: Any, timeout: float = 60.0, frees: bool = True
    ) -> list[Any]:
        """Call ``function(*arguments)`` on ``n`` ranks, where ``MPI.COMM_WORLD`` has these ranks only.

        Function, arguments and results are pickled; the function by its module and name.

        Args:
            timeout: In seconds, multiplied by the factor of this machine.
            frees: Whether the function must free its MPI objects.

        Returns:
            What the function returned, by rank.
        """
        if n > self._size:
            raise ValueError(f"this world has {self._size} ranks, not {n}")
        if self._process is None:
            self._start()
        timeout = limit(timeout)
        task = pickle.dumps(Task(n, function, arguments, frees))
        replies: dict[int, Returned | Failed] = {}
        try:
            with contextlib.suppress(OSError):  # a rank has ended; its connection is at its end
                for connection in self._connections[:n]:
                    connection.send_bytes(task)
            self._collect(n, replies, time.monotonic() + timeout)
        except BaseException:
            self.close()  # the next call must not get the replies to this one
            raise
        returned = [reply for reply in replies.values() if isinstance(reply, Returned)]
        if len(returned) < n:
            report = self._report(n, replies, timeout)
            self.close()
            pytest.fail(report, pytrace=False)
        if leaks := [f"rank {rank}: {leak}" for rank, reply in replies.items() for leak in reply.leaks]:  # type: ignore[union-attr]
            self.close()
            pytest.fail("left behind by the test:\n" + "\n".join(leaks), pytrace=False)
        return [replies[rank].value for rank in range(n)]  # type: ignore[union-attr]

    def train(self, n: int, *words: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
        """Do what ``mpitrain train WORDS`` does on ``n`` ranks; it must succeed.

        Returns:
            The output of the ranks, one after the other.
        """
        done = self._train(n, *words, **options)
        assert done.returncode == 0, done.stdout + done.stderr
        return done

    def refusal(self, n: int, *words: str | Path, **options: Any) -> str:
        """Return the error line of ``mpitrain train WORDS``, which all ranks must refuse with status 2."""
        done = self._train(n, *words, frees=False, **options)
        assert done.returncode == 2, done.stdout + done.stderr
        return one_line(done.stderr)

    def run(self, n: int, program: Path, *words: str | Path, timeout: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Run a Python file as the main program on ``n`` ranks; see ``train``."""
        place = calls.Place(str(ROOT), {})
        return _joined(self.call(n, calls.program, [str(program), *map(str, words)], place, timeout=timeout))

    def _train(
        self,
        n: int,
        *words: str | Path,
        timeout: float = 60.0,
        env: Mapping[str, str] | None = None,
        cwd: Path = ROOT,
        frees: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        place = calls.Place(str(cwd), dict(env or {}))
        # After a script, its parameters stay in shared memory.
        frees = frees and not any(is_script(Path(word)) for word in words if Path(word).suffix == ".py")
        return _joined(self.call(n, calls.train, list(map(str, words)), place, timeout=timeout, frees=frees))

    def close(self) -> None:
        """End the ranks, if there are any."""
        if self._process is None:
            return
        for connection in self._connections:
            connection.close()  # an idle rank exits
        try:
            self._process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            for pid in self._pids:  # mpirun gives each rank a process group of its own
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        forget_session(self._process.pid)
        self._process, self._connections, self._pids = None, [], []

    def _start(self) -> None:
        address = str(Path(self._folder.name) / "socket")
        with contextlib.suppress(FileNotFoundError):
            os.unlink(address)
        self._output = Path(self._folder.name) / "output"
        words = [*self._mpi.command(self._size), str(self._python), "-m", "tests.support.world.rank"]
        words += [address, *self._modules]
        with Listener(address, "AF_UNIX", backlog=self._size) as listener, self._output.open("wb") as output:
            listener._listener._socket.settimeout(_START_S)  # type: ignore[attr-defined]
            self._process = subprocess.Popen(
                words,
                env={**os.environ, **LAUNCHER_ENVIRONMENT, **with_checkout(), **self._environment},
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            found = {}
            try:
                for _ in range(self._size):
                    connection = listener.accept()
                    rank, pid = connection.recv()
                    found[rank] = connection, pid
            except OSError:
                self.close()
                pytest.fail(f"the ranks did not start:\n{self._output.read_text()}", pytrace=False)
        self._connections = [found[rank][0] for rank in range(self._size)]
        self._pids = [found[rank][1] for rank in range(self._size)]

    def _collect(self, n: int, replies: dict[int, Returned | Failed], deadline: float) -> None:
        """Wait for the replies of ``n`` ranks; after the first failure, for a short time only."""
        waiting = dict(enumerate(self._connections[:n]))
        while waiting and (ready := wait(waiting.values(), max(0.0, deadline - time.monotonic()))):
            for rank in [rank for rank, connection in waiting.items() if connection in ready]:
                connection = waiting.pop(rank)
                try:
                    replies[rank] = pickle.loads(connection.recv_bytes())
                except (EOFError, OSError):
                    replies[rank] = Failed("this rank has ended")
                if isinstance(replies[rank], Failed):
                    deadline = min(deadline, time.monotonic() + _GRACE_S)

    def _report(self, n: int, replies: dict[int, Returned | Failed], timeout: float) -> str:
        """Return the traceback, or the stack, of each rank."""
        hanging = [rank for rank in range(n) if rank not in replies]
        stacks = self._stacks(hanging)
        lines = [] if any(isinstance(reply, Failed) for reply in replies.values()) else [f"no end after {timeout:g} s"]
        for rank in range(n):
            reply = replies.get(rank)
            text = stacks[rank] if reply is None else reply.traceback if isinstance(reply, Failed) else "returned"
            lines.append(f"--- rank {rank}: {'still running' if reply is None else ''}\n{text.rstrip()}")
        if output := self._output.read_text(errors="replace").strip():
            lines.append(f"--- output of the ranks\n{output}")
        return "\n".join(lines)

    def _stacks(self, ranks: Sequence[int]) -> dict[int, str]:
        """Return the stacks of these ranks, which they write when they get a signal."""
        files = {rank: Path(self._folder.name) / f"stacks-{self._pids[rank]}" for rank in ranks}
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pids[rank], STACKS_SIGNAL)
        with contextlib.suppress(AssertionError):
            wait_until(lambda: all(file.stat().st_size for file in files.values()), "the stacks", _STACKS_S)
        return {rank: file.read_text() for rank, file in files.items()}


def connect(address: str, rank: int) -> Connection:
    """Connect a rank to its controller."""
    connection = Client(address, "AF_UNIX")
    connection.send((rank, os.getpid()))
    return connection


def _joined(done: Sequence[subprocess.CompletedProcess[str]]) -> subprocess.CompletedProcess[str]:
    first = done[0]
    assert {each.returncode for each in done} == {first.returncode}, done
    texts = ["".join(text) for text in zip(*((each.stdout, each.stderr) for each in done), strict=True)]
    return subprocess.CompletedProcess(first.args, first.returncode, *texts)
