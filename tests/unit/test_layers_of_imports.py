"""Imports run down the layers of the design: arrays know nothing of MPI, strategies nothing of flags."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "mpitrain"

# Lowest first; a module may import those of its own line and of lines above it in this list.
LAYERS = [
    ["blas", "errors", "hdf5", "launched", "nvml", "rundir", "stopping", "version", "versions"],
    ["params"],
    ["kernels"],
    ["device"],
    ["cuda"],
    ["config"],
    ["placement", "roles"],
    ["nn"],
    ["optim"],
    ["data"],
    ["monitor"],
    ["attendant"],
    ["hooks"],
    ["job"],
    ["plan"],
    ["mpi"],
    ["cluster"],
    ["devices"],
    ["comm"],
    ["gpu", "replica", "whereabouts"],
    ["strategy"],
    ["checkpoint"],
    ["resuming", "saving", "server", "start", "validation"],
    ["train"],
    ["records"],
    ["rank", "launch", "flags", "show", "checkpoint_commands"],
    ["doctor"],
    ["cli"],
    ["__init__", "__main__"],
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
MPI_USERS = {"mpi", "cluster", "comm", "strategy", "gpu", "server", "train", "doctor"}


def part(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> set[str]:
    """Parts of the package that a module imports when it runs (those for type checkers do not count)."""
    package = path.relative_to(PACKAGE.parent).with_suffix("").parts[:-1]
    found: set[str] = set()
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1]
            target = [*base[1:], *(node.module.split(".") if node.module else [])]
            found |= {target[0]} if target else {alias.name for alias in node.names}
    return found


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_run_down(path: Path) -> None:
    own = part(path)
    for name in imports(path):
        assert LEVEL[name] <= LEVEL[own], f"{path} imports {name}, which is above {own}"


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_only_the_edge_knows_mpi(path: Path) -> None:
    text = path.read_text()
    if part(path) not in MPI_USERS | {"rank"}:
        assert "mpi" not in imports(path)
    if path not in (PACKAGE / "mpi.py", PACKAGE / "hdf5.py", PACKAGE / "launch" / "makes.py"):
        assert "mpi4py" not in [name.split(".")[0] for name in absolute_imports(path)]
    if path != PACKAGE / "hdf5.py":
        assert "h5py" not in absolute_imports(path)
    if path != PACKAGE / "mpi.py":
        assert "COMM_WORLD" not in [node.attr for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute)]


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_cupy_is_imported_in_one_place_and_none_needs_it(path: Path) -> None:
    """A machine without a GPU has no CuPy: who wants what is written with it imports that in a function."""
    if part(path) != "cuda":
        assert "cupy" not in [name.split(".")[0] for name in absolute_imports(path)]
    if part(path) not in ("cuda", "gpu"):
        beginning = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ImportFrom)]
        modules = [(node.module or "").split(".")[0] for node in beginning if node.level]
        assert not {"cuda", "gpu"} & set(modules)


def absolute_imports(path: Path) -> list[str]:
    nodes = list(ast.walk(ast.parse(path.read_text())))
    plain = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    return plain + [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and not node.level]
