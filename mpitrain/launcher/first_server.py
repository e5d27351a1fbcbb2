"""The server that forks the first ranks on this host, so that their modules are imported once, and early."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import re
import secrets
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..core.openblas import without_chosen
from ..process import fork_server, host_watcher
from ..process.launcher_env import UCX_LOG_LEVEL
from ..process.standard_streams import open_closed_streams
from .hosts import is_local

if TYPE_CHECKING:
    from .mpi_launcher import LaunchSpec, LocalMachine

_END_S = 1.0
_NEEDS_NONE = {"--help", "--help-all", "--dry-run", "--", "-m"}  # nothing is started, or a program

# Modules that set no variables which torch reads when it is imported.
_SETS_NOTHING = {*sys.stdlib_module_names, "h5py", "matplotlib", "mpi4py", "mpitrain", "numpy", "pandas", "scipy"}

_server: FirstServer | None = None


def start(arguments: Sequence[str]) -> None:
    """Start the server for ``mpitrain run ARGUMENTS``, as early as possible; a program is then found not to need it."""
    global _server
    open_closed_streams()
    with contextlib.suppress(OSError):  # ranks then start by themselves
        if _NEEDS_NONE.isdisjoint(arguments):
            _server = FirstServer(arguments)


def started() -> FirstServer | None:
    """Return the server that this process has started, if any."""
    return _server


class FirstServer:
    """Starts the server, which imports the modules of ranks while this process does, and reads the job file.

    Args:
        arguments: The arguments of ``mpitrain run``, which tools such as ``ps`` show for the ranks. The words before
            them are those by which ``process.host_watcher`` recognizes ranks.

    Raises:
        OSError: The server cannot be started.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        self._name, self._is_used = secrets.token_hex(16), False
        listening = fork_server.bind(self._name)
        if listening is None:
            raise OSError("sockets in the abstract namespace are not available")
        with listening:
            number, null = listening.fileno(), subprocess.DEVNULL
            self._process = subprocess.Popen(
                [sys.executable, "-m", "mpitrain", "train", *arguments],
                env={
                    UCX_LOG_LEVEL: "error",  # as for MPICH's ranks; it is read when the library is loaded
                    **without_chosen(os.environ),
                    fork_server.FIRST: self._name,
                    fork_server.SOCKET: str(number),
                },
                stdin=subprocess.PIPE,  # ends with this process
                stdout=null,
                stderr=null,
                pass_fds=[number],
                start_new_session=True,
                preexec_fn=_end_with_parent,  # until it has forked a rank
            )
        atexit.register(self.close)
        for module in _slow_imports(arguments):
            fork_server.import_in_server(self._name, module, nice=0)

    def variables(self, spec: LaunchSpec, machine: LocalMachine) -> dict[str, str]:
        """Return the variables with which ranks find the server.

        If it cannot start ranks as requested, return none, and end it.
        """
        # In an allocation, ranks may belong to another job step, with other cores and GPUs than this process.
        is_here = not machine.allocated and all(is_local(host.name) for host in spec.hosts or ())
        if not is_here or spec.words or spec.python != sys.executable:
            self.close()
            return {}
        self._is_used = True
        host_watcher.MARKS.add(f"{fork_server.FIRST}={self._name}")
        return {fork_server.FIRST: self._name}

    def close(self) -> None:
        """End the server, but not before its ranks."""
        if self._is_used:
            fork_server.stop_server(self._name)
        else:
            self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)


def _slow_imports(arguments: Sequence[str]) -> tuple[str, ...]:
    """Return what ranks will import if a job file or script imports torch: it takes longer than all other modules.

    There are none if the file, or a module that it imports before torch, may set variables that torch reads when it is
    imported, or change what is imported.
    """
    file = Path(next((argument for argument in arguments if argument.endswith(".py")), ""))
    with contextlib.suppress(OSError, ValueError):
        text = file.read_text()
        torch = re.search(r"^(import|from)\s+torch\b", text, re.MULTILINE)
        if torch is None or re.search(r"environ|putenv|dotenv|sys\.path|addsitedir", text):
            return ()
        own = (folder / name for folder in (file.resolve().parent, Path.cwd()) for name in ("torch", "torch.py"))
        lines = re.findall(r"^\s*(?:import|from)\s+([\w., ]+)", text[: torch.start()], re.MULTILINE)
        names = {re.split(r"[ .]", part.strip())[0] for line in lines for part in line.split(" import ")[0].split(",")}
        if any(path.exists() for path in own) or not names <= _SETS_NOTHING:
            return ()
        # Every optimizer of torch imports the second one.
        return ("torch", "torch._dynamo") if re.search(r"\btorch(\.| import .*\b)optim\b", text) else ("torch",)
    return ()


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(fork_server.PR_SET_PDEATHSIG, signal.SIGKILL)
