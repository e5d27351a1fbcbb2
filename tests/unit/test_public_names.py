"""The public names of the package: which modules are loaded when the names are imported, and which types they have."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from ..support.launch import ROOT, missing
from ..support.waiting import limit

TYPED = ROOT / "tests" / "support" / "scripts" / "typed.py"
WRONG = """import mpitrain
state: int = mpitrain.Run("run").status.state
mpitrain.launch(3)
"""


def modules_after(statement: str) -> set[str]:
    words = [sys.executable, "-c", f"{statement}; import sys; print(*sys.modules)"]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=60)
    return set(done.stdout.split())


def test_importing_the_package_loads_little() -> None:
    # Modules are checked instead of the time. The import of the package takes 5 ms, and that of NumPy takes 100 ms.
    assert {"numpy", "click", "mpi4py", "torch"} & modules_after("import mpitrain") == set()
    assert {"mpi4py.MPI", "torch"} & modules_after("from mpitrain import Run, launch, load, submit") == set()
    # The imports of these take three quarters of the time of a process that starts a program.
    assert {"numpy", "h5py", "numba", "mpi4py.MPI"} & modules_after("import mpitrain.launcher.supervisor") == set()


@pytest.mark.full
def test_a_users_file_is_typed(tmp_path: Path) -> None:
    if importlib.util.find_spec("mypy") is None:
        missing("mypy; 'make lint' installs it")
    wrong = tmp_path / "wrong.py"
    wrong.write_text(f"{WRONG}# {tmp_path}: mypy's cache would return the path of an equal file\n")
    words = [sys.executable, "-m", "mypy", str(TYPED), str(wrong)]  # with the options, and the cache, of "make lint"
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, timeout=limit(120), check=False)
    places = [line.split(": error")[0] for line in done.stdout.splitlines() if ": error" in line]
    assert places == [f"{wrong}:2", f"{wrong}:3"], done.stdout + done.stderr
