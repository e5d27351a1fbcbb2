"""The state of a process that a test may change: what is restored after the test, and what is reported as a leak."""

from __future__ import annotations

import _posixshmem
import logging
import os
import random
import signal
import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from mpitrain.comm.mpi import MPI

_SHARED_MEMORY = "/dev/shm/"
_SET_BY_IMPORTS = {"CRC32C_SW_MODE", "CUDNN_FRONTEND_CUDART_LIB_NAME", "KMP_INIT_AT_FORK", "TORCHINDUCTOR_CACHE_DIR"}
_SIGNALS = [number for number in signal.valid_signals() if number not in (signal.SIGKILL, signal.SIGSTOP)]


class ProcessState:
    """The state of this process at construction."""

    def __init__(self) -> None:
        self._environment = dict(os.environ)
        self._folder = os.getcwd()
        self._opened = {path for path in _opened if os.path.exists(path)}
        self._handles = _next_handles()
        self._handlers = {number: signal.getsignal(number) for number in _SIGNALS}
        self._path, self._argv, self._hook = list(sys.path), list(sys.argv), sys.excepthook
        self._filters = list(warnings.filters)
        root = logging.getLogger()
        self._logging = root.level, list(root.handlers)
        self._random, self._numpy = random.getstate(), np.random.get_state()
        self._torch = _torch_settings()
        self._definitions = _definitions(set(sys.modules))

    def restore(self, frees: bool) -> list[str]:
        """Restore the state; return what is wrong, one line for each environment variable, file, and kind of object."""
        leaks = self._restore_environment() + self._new_files()
        more = {kind: now - self._handles[kind] for kind, now in _next_handles().items() if frees}
        leaks += [f"{count} MPI {kind} not freed" for kind, count in more.items() if count > 0]
        now = _definitions({module for module, _, _ in self._definitions})
        leaks += [
            f"changed: {'.'.join(filter(None, name))}"
            for name in self._definitions
            if now.get(name) is not self._definitions[name]
        ]
        os.chdir(self._folder)
        for number, handler in self._handlers.items():
            if signal.getsignal(number) != handler and handler is not None:
                signal.signal(number, handler)
        sys.path[:], sys.argv[:], sys.excepthook = self._path, self._argv, self._hook
        warnings.filters[:] = self._filters  # type: ignore[index]
        root = logging.getLogger()
        root.level, root.handlers[:] = self._logging
        random.setstate(self._random)
        np.random.set_state(self._numpy)
        if torch := sys.modules.get("torch"):
            if torch.distributed.is_available() and torch.distributed.is_initialized():
                leaks.append("torch's process group not destroyed")
                torch.distributed.destroy_process_group()
            for set_value, value in self._torch or [(torch.set_default_dtype, torch.float32)]:
                set_value(value)
        return leaks

    def _restore_environment(self) -> list[str]:
        names = {*self._environment, *os.environ} - _SET_BY_IMPORTS
        changed = sorted(name for name in names if self._environment.get(name) != os.environ.get(name))
        for name in changed:
            if name in self._environment:
                os.environ[name] = self._environment[name]
            else:
                del os.environ[name]
        return [f"environment variable {name}" for name in changed]

    def _new_files(self) -> list[str]:
        """Return the files in shared memory that this process has made since, and not removed."""
        return [f"file {path}" for path in sorted(_opened) if path not in self._opened and os.path.exists(path)]


_opened: set[str] = set()  # the paths in shared memory that this process has opened; other processes make files, too


def watch_shared_memory() -> None:
    """Record the files and folders in shared memory that this process opens or makes from Python, from now on."""

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("open", "os.mkdir") and isinstance(arguments[0], (str, os.PathLike)):
            path = os.fspath(arguments[0])
            if isinstance(path, str) and path.startswith(_SHARED_MEMORY):
                _opened.add(path)

    def shm_open(name: str, *arguments: Any, **options: Any) -> int:
        _opened.add(_SHARED_MEMORY + name.lstrip("/"))
        return open_shared(name, *arguments, **options)  # type: ignore[no-any-return]

    sys.addaudithook(watch)
    open_shared = _posixshmem.shm_open  # is not audited
    _posixshmem.shm_open = shm_open


def _definitions(modules: set[str]) -> dict[tuple[str, str, str], object]:
    """Return what the package's modules define: functions, classes, methods, constants; by module, class and name."""
    found: dict[tuple[str, str, str], object] = {}
    for module in modules:
        if module.startswith("mpitrain") and (imported := sys.modules.get(module)):
            for name, value in vars(imported).items():
                if callable(value) or name.isupper():
                    found[module, "", name] = value
                if isinstance(value, type) and value.__module__ == module:
                    members = vars(value).items()
                    found.update({(module, name, key): member for key, member in members if callable(member)})
    return found


def _torch_settings() -> list[tuple[Callable[[Any], object], Any]]:
    """Return torch's settings: the function that sets one, and its value; none if torch is not imported."""
    torch = sys.modules.get("torch")
    if torch is None:
        return []
    return [
        (torch.set_default_dtype, torch.get_default_dtype()),
        (torch.set_num_threads, torch.get_num_threads()),
        (torch.set_rng_state, torch.get_rng_state()),
        (torch.set_grad_enabled, torch.is_grad_enabled()),
        (torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled()),
    ]


def _next_handles() -> dict[str, int]:
    """Return the numbers of the next MPI objects; Open MPI uses the lowest number that is free, MPICH does not."""
    if not MPI.Get_library_version().startswith("Open MPI"):
        return {}
    comm = MPI.COMM_SELF.Dup()
    window = MPI.Win.Create(None, comm=MPI.COMM_SELF)
    handles = {"communicators": comm.py2f(), "windows": window.py2f()}
    window.Free()
    comm.Free()
    return handles
