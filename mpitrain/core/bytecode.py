"""Compiled modules of this package in the user's cache, where Python writes none beside the sources.

With ``PYTHONDONTWRITEBYTECODE``, which container images set, and sources that were not compiled at installation, each
rank of each run would compile a hundred modules.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import cache_from_source
from pathlib import Path
from types import CodeType, ModuleType


class _CachingLoader(SourceFileLoader):
    """Loads a module; its compiled code lies below a folder, as with ``sys.pycache_prefix``."""

    def __init__(self, name: str, path: str, folder: str) -> None:
        super().__init__(name, path)
        self._folder = folder

    def get_code(self, fullname: str) -> CodeType | None:
        before = sys.pycache_prefix, sys.dont_write_bytecode
        sys.pycache_prefix, sys.dont_write_bytecode = self._folder, False
        try:
            return super().get_code(fullname)
        finally:
            sys.pycache_prefix, sys.dont_write_bytecode = before


class _CachingFinder:
    """Finds the modules of a package that have no compiled code beside their sources."""

    def __init__(self, package: str, folder: str) -> None:
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
                spec.loader = _CachingLoader(name, source, self._folder)
        return spec


def store(package: str) -> None:
    """Store the compiled code of a package's modules in the user's cache from now on.

    Does nothing if Python stores it beside the sources, if there is no home directory, or if the folder is another
    user's: its content is executed.
    """
    if not sys.dont_write_bytecode or sys.pycache_prefix is not None:
        return
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    folder = Path(base, "mpitrain", "bytecode")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        is_own = folder.stat().st_uid == os.geteuid()
    except OSError:
        return
    if is_own:
        sys.meta_path.insert(0, _CachingFinder(package, str(folder)))
