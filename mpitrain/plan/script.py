"""Scripts that train by themselves, with ``mpitrain.train`` or a ``mpitrain.Trainer``, in place of a job file."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .config import RunConfig

_STARTS = {"Trainer", "train"}  # names of this package by which scripts train


@dataclass(frozen=True)
class ScriptRequest:
    """A script to run on every rank.

    Attributes:
        path: The script.
        arguments: Its command line.
        options: The run's options that were given on the command line; they replace those of the script.
        config: The same, with defaults.
    """

    path: Path
    arguments: list[str] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    config: RunConfig = field(default_factory=RunConfig)

    @property
    def name(self) -> str:
        """The script's name."""
        return self.path.stem


def is_script(path: Path) -> bool:
    """Return whether a Python file trains by itself: it defines no ``job``, and uses ``train`` or ``Trainer``."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return False
    if "job" in _names_defined(tree):
        return False
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    imported = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "mpitrain"
        for alias in node.names
    }
    imports_package = any(
        alias.name == "mpitrain" for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names
    )
    return bool(imported & _STARTS) or (imports_package and bool(used & _STARTS))


def _names_defined(tree: ast.Module) -> Iterator[str]:
    """Yield the names that a module defines, or may define by an import of all names."""
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from ("job" if alias.name == "*" else alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))
