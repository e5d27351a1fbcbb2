"""Store the bytecode of this package's modules in the user's cache if Python does not write ``__pycache__``.

If ``PYTHONDONTWRITEBYTECODE`` is set, as in many container images, and the sources were not compiled at installation,
each rank of each run would compile all modules.
"""

from __future__ import annotations

import contextlib
import hashlib
import marshal
import os
import sys
import tempfile
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import MAGIC_NUMBER, cache_from_source
from pathlib import Path
from types import CodeType, ModuleType


class _StoringLoader(SourceFileLoader):
    """Loads a module; stores its bytecode in a folder, in a file named by a digest of path and source."""

    def __init__(self, name: str, path: str, folder: Path) -> None:
        super().__init__(name, path)
        self._folder = folder

    def get_code(self, fullname: str) -> CodeType | None:
        source = self.get_data(self.path)
        key = os.fsencode(repr((MAGIC_NUMBER, sys.flags.optimize, self.path))) + source
        stored = self._folder / f"{fullname}-{hashlib.sha256(key).hexdigest()[:32]}.bin"
        code = _read(stored)
        if code is None:
            code = self.source_to_code(source, self.path)
            _write(stored, marshal.dumps(code))
        return code


class _StoringFinder:
    """Finds the modules of a package that are not in ``__pycache__``."""

    def __init__(self, package: str, folder: Path) -> None:
        self._prefix, self._folder = f"{package}.", folder

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not name.startswith(self._prefix):
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and type(spec.loader) is SourceFileLoader:
            source = spec.loader.path
            if not os.path.exists(cache_from_source(source)):
                spec.loader = _StoringLoader(name, source, self._folder)
        return spec


def store(package: str) -> None:
    """Store the bytecode of a package's modules in the user's cache when they are imported.

    Does nothing if the user has chosen a folder for Python's own cache, or if there is no home directory.
    """
    if sys.pycache_prefix is not None:
        return
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        if not base.is_absolute():
            return
        folder = base / "mpitrain" / "bytecode"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (RuntimeError, OSError):
        return
    sys.meta_path.insert(sys.meta_path.index(PathFinder), _StoringFinder(package, folder))


def _read(path: Path) -> CodeType | None:
    """Return the code of a file; None if the file does not exist, belongs to another user, or is damaged."""
    try:
        with path.open("rb") as file:
            is_own = os.fstat(file.fileno()).st_uid in (0, os.geteuid())  # the code is executed
            code = marshal.loads(file.read()) if is_own else None
    except (OSError, ValueError, EOFError, TypeError):
        return None
    return code if isinstance(code, CodeType) else None


def _write(path: Path, content: bytes) -> None:
    with contextlib.suppress(OSError), tempfile.TemporaryDirectory(dir=path.parent) as folder:
        whole = Path(folder, path.name)
        whole.write_bytes(content)
        whole.replace(path)
