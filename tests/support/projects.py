"""Projects that ``mpitrain init`` has made."""

from __future__ import annotations

from pathlib import Path

from .launch import Mpi, run


def make_project(mpi: Mpi, folder: Path, kind: str) -> None:
    """Make a project of this kind; its tests must pass, and the syntax of its batch script must be correct."""
    made = run([str(mpi.python), "-m", "mpitrain", "init", str(folder), "--from", kind])
    assert made.returncode == 0, made.stderr
    tested = run([str(mpi.python), "-m", "pytest", "-q"], timeout=240, cwd=folder)
    assert tested.returncode == 0, tested.stdout
    (script,) = folder.glob("*.sbatch")
    assert run(["bash", "-n", str(script)]).returncode == 0
