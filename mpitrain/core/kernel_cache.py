"""Compiled kernels on disk, so that only the first run on a machine compiles them.

Numba's own cache is not safe here. It is in the folders of the sources, where its files keep an uninstalled package
importable. In addition, two processes that compile different signatures of a function at the same time can use the same
file name. A third process then loads the wrong code. The cache of this module lies in the user's cache directory and
has one file per signature.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import logging
import os
import pickle
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any

import numba
from numba.core import compiler, entrypoints, serialize
from numba.core.registry import cpu_target
from numba.core.runtime.nrt import rtsys

from ..version import __version__

_PACKAGE = Path(__file__).parents[1]
_SOURCES = ("backend", "core", "comm", "data", "models", "optim", "strategy")  # packages whose kernels call one another
_DIGEST_BYTES = 32

_log = logging.getLogger(__name__)


def cache_directory() -> Path | None:
    """Return the directory of this version's kernels, or None if the user has no home directory.

    It lies in ``$NUMBA_CACHE_DIR``, ``$XDG_CACHE_HOME/mpitrain`` or ``~/.cache/mpitrain``. Its name holds the versions
    and a digest of the sources.
    """
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mpitrain"
    except RuntimeError:
        return None
    base = Path(os.environ.get("NUMBA_CACHE_DIR") or base)
    python = f"py{sys.version_info.major}{sys.version_info.minor}"
    return base / f"kernels-{__version__}-{python}-numba{numba.__version__}-{_digest_sources()[:16]}"


def prepare() -> None:
    """Do now what the first use of a kernel would do, but load no kernel: for a process that forks others."""
    for module in ("numba.np.arrayobj", "numpy.ma"):
        importlib.import_module(module)
    _digest_sources()
    entrypoints.init_all()
    rtsys.initialize(cpu_target.target_context)


@functools.cache
def _digest_sources() -> str:
    digest = hashlib.sha256()
    for package in _SOURCES:
        for path in sorted((_PACKAGE / package).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _identity(function: Callable[..., Any]) -> tuple[object, ...]:
    """Return a value that distinguishes a function from others: its code, and its closure, such as other kernels."""
    code = function.__code__
    constants = [constant for constant in code.co_consts if not isinstance(constant, CodeType)]
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    closure = [_identity(value.py_func) if hasattr(value, "py_func") else value for value in cells]
    return function.__qualname__, code.co_code, code.co_names, constants, closure


class KernelCache:
    """The cache of one function, with the methods that Numba's dispatcher calls."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._code = hashlib.sha256(repr(_identity(function)).encode()).hexdigest()

    @property
    def cache_path(self) -> str:
        """The directory of the files."""
        return str(cache_directory() or "")

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return the compiled function of a signature, or None if it is not stored or its file is damaged."""
        rtsys.initialize(
            target_context
        )  # registers functions that compiled code calls; ``refresh`` would also prepare for compilation
        path = self._path(sig, target_context.codegen())
        try:
            # The content is executed, so it must not be another user's.
            own = path is not None and path.stat().st_uid in (0, os.geteuid())
            content = path.read_bytes() if path is not None and own else b""
        except OSError:
            return None
        digest, payload = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
        if hashlib.sha256(payload).digest() != digest:
            return None
        return compiler.CompileResult._rebuild(target_context, *pickle.loads(payload))

    def save_overload(self, sig: Any, data: Any) -> None:
        """Store a compiled function; a directory that cannot be written is reported in the log."""
        path, result = self._path(sig, data.codegen), data._asdict()
        if path is None or result["lifted"] or result["library"].has_dynamic_globals:
            return
        payload = serialize.dumps(data._reduce())
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=path.parent) as folder:
                whole = Path(folder, path.name)
                whole.write_bytes(hashlib.sha256(payload).digest() + payload)
                whole.replace(path)
        except OSError as error:
            _log.debug("%s: compiled kernels are not stored: %s", path.parent, error.strerror)

    def _path(self, sig: Any, codegen: Any) -> Path | None:
        directory = cache_directory()
        if directory is None:
            return None
        key = (self._code, str(sig), *map(str, codegen.magic_tuple()))
        name = f"{self._function.__module__}.{self._function.__qualname__}"
        return directory / f"{name}-{hashlib.sha256(repr(key).encode()).hexdigest()[:24]}.bin"
