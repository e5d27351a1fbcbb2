"""Scripts that train by themselves, with ``mpitrain.train`` or a ``mpitrain.Trainer``, in place of a job file."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .config import RunConfig

_STARTS = {"Trainer", "train"}  # names of this package with which scripts train
_LITERALS = (ast.Constant, ast.Tuple, ast.List, ast.Dict, ast.Set, ast.UnaryOp, ast.unaryop, ast.expr_context)
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclass(frozen=True)
class ScriptRequest:
    """A script to run on every rank.

    Attributes:
        path: The script.
        arguments: The script's command-line arguments.
        options: The run's options that were given on the command line; they replace the options in the script.
        config: The same options, with the defaults of all others.
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
    """Return whether a Python file trains by itself: it uses ``train`` or ``Trainer``, and defines no ``job``.

    The file may also import modules from its own folder that use these names. A file that defines ``job`` is a script
    only if it also trains as soon as it is imported.
    """
    tree = _parsed(path)
    if tree is None:
        return False
    if not any("job" in _names_defined(node) for node in tree.body):
        files = {path: tree, **_modules_beside(path, tree)}
        return any(_refers_to(file, file.body, _STARTS) for file in files.values())
    at_import = [node for node in tree.body if not isinstance(node, _DEFINITIONS) and not _is_guard(node)]
    return _refers_to(tree, at_import, _STARTS)


def is_program(path: Path) -> bool:
    """Return whether a Python file is neither a job file nor a script that trains with this package.

    A file that uses ``Job`` of this package is a job file, possibly a faulty one.
    """
    tree = _parsed(path)
    if tree is None or is_script(path) or _refers_to(tree, tree.body, {"Job"}):
        return False
    acts = any(_is_guard(node) or isinstance(node, (ast.Expr, ast.For, ast.While, ast.With)) for node in tree.body[1:])
    defining = [node for node in tree.body if "job" in _names_defined(node)]
    if not defining:
        return True
    if any(isinstance(node, _DEFINITIONS) for node in defining):
        return acts and not _imports_package(tree)
    return acts


def only_defines(path: Path) -> bool:
    """Return whether a Python file has functions or classes, but no statement with an effect."""
    tree = _parsed(path)
    if tree is None:
        return False
    passive = (*_DEFINITIONS, ast.Import, ast.ImportFrom)
    inert = [node for node in tree.body if isinstance(node, passive) or _is_constant(node)]
    return len(inert) == len(tree.body) and any(isinstance(node, _DEFINITIONS) for node in inert)


def may_define_job(path: Path) -> bool:
    """Return whether a file contains the name ``job``, imports all names of a module, or cannot be parsed."""
    tree = _parsed(path)
    return tree is None or any(
        "job" in _names_defined(node)
        or (isinstance(node, ast.Name) and node.id == "job")
        or (isinstance(node, ast.Constant) and node.value == "job")
        for node in ast.walk(tree)
    )


def functions_in(path: Path) -> list[str]:
    """Return the names of a Python file's functions, sorted."""
    tree = _parsed(path)
    return sorted(node.name for node in tree.body if isinstance(node, ast.FunctionDef)) if tree is not None else []


def _parsed(path: Path) -> ast.Module | None:
    try:
        return ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None


def _refers_to(tree: ast.Module, statements: Iterable[ast.stmt], wanted: set[str]) -> bool:
    """Return whether some statements of a module refer to one of these names of this package."""
    packages, names = set[str](), set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            packages |= {alias.asname or "mpitrain" for alias in node.names if alias.name == "mpitrain"}
        elif isinstance(node, ast.ImportFrom) and node.module == "mpitrain":
            names |= {alias.asname or alias.name for alias in node.names if alias.name in wanted}
    return any(
        (isinstance(node, ast.Name) and node.id in names)
        or (
            isinstance(node, ast.Attribute)
            and node.attr in wanted
            and isinstance(node.value, ast.Name)
            and node.value.id in packages
        )
        for statement in statements
        for node in ast.walk(statement)
    )


def _modules_beside(path: Path, tree: ast.Module) -> dict[Path, ast.Module]:
    """Return the modules in a file's folder, or in packages there, that it imports directly or indirectly."""
    modules: dict[Path, ast.Module] = {}
    importing = [tree]
    while importing:
        for name in _imported(importing.pop()):
            place = path.parent.joinpath(*name.split("."))
            for file in (place.with_suffix(".py"), place / "__init__.py"):
                if file != path and file not in modules and (module := _parsed(file)) is not None:
                    modules[file] = module
                    importing.append(module)
    return modules


def _imported(tree: ast.Module) -> set[str]:
    """Return the names of modules that a module imports, or may import, from the import path."""
    names = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def _imports_package(tree: ast.Module) -> bool:
    """Return whether a file imports this package."""
    imports = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = [alias.name for node in imports if isinstance(node, ast.Import) for alias in node.names]
    names += [str(node.module) for node in imports if isinstance(node, ast.ImportFrom)]
    return any(name.partition(".")[0] == "mpitrain" for name in names)


def _is_constant(node: ast.stmt) -> bool:
    """Return whether a statement is a docstring or ``pass``, or assigns a literal to a name."""
    if isinstance(node, (ast.Expr, ast.Assign, ast.AnnAssign)):
        return node.value is None or all(isinstance(part, _LITERALS) for part in ast.walk(node.value))
    return isinstance(node, ast.Pass)


def _is_guard(node: ast.stmt) -> bool:
    """Return whether a statement is an ``if`` that tests ``__name__``."""
    return isinstance(node, ast.If) and any(
        isinstance(part, ast.Name) and part.id == "__name__" for part in ast.walk(node.test)
    )


def _names_defined(node: ast.AST) -> Iterator[str]:
    """Yield the names that a statement defines, or may define by an import of all names."""
    if isinstance(node, _DEFINITIONS):
        yield node.name
    elif isinstance(node, (ast.Import, ast.ImportFrom)):
        yield from ("job" if alias.name == "*" else alias.asname or alias.name for alias in node.names)
    elif isinstance(node, ast.Assign):
        yield from (target.id for target in node.targets if isinstance(target, ast.Name))
