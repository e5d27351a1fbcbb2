"""Compiled modules in the user's cache, where Python writes none beside the sources."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from ..support.launch import ROOT, run

ASK = "import mpitrain.plan.config as c, mpitrain; print(c.__file__); print(c.__cached__)"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the package without compiled modules."""
    shutil.copytree(ROOT / "mpitrain", tmp_path / "mpitrain", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def imported(folder: Path, **environment: str) -> str:
    """Import a module of a copy of the package; return its file and where its compiled code would be."""
    ours = {"PYTHONPATH": str(folder), "XDG_CACHE_HOME": str(folder / "cache"), "PYTHONDONTWRITEBYTECODE": "1"}
    done = run([sys.executable, "-c", ASK], env=ours | environment, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(folder / "mpitrain"))
    return done.stdout


def stored(folder: Path) -> list[Path]:
    return sorted((folder / "cache").rglob("config.*.pyc"))


def test_modules_are_compiled_once(folder: Path) -> None:
    imported(folder)
    (path,) = stored(folder)
    assert not list(folder.glob("mpitrain/**/__pycache__"))
    before = path.stat().st_mtime_ns
    imported(folder)
    assert path.stat().st_mtime_ns == before
    source = folder / "mpitrain" / "plan" / "config.py"
    source.write_text(source.read_text() + "\n# changed\n")
    imported(folder)
    assert path.stat().st_mtime_ns != before


@pytest.mark.parametrize("name", ["PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX"])
def test_the_users_choice_is_left_alone(folder: Path, name: str) -> None:
    imported(folder, **{name: "" if name == "PYTHONDONTWRITEBYTECODE" else str(folder / "elsewhere")})
    assert not stored(folder)


def test_a_folder_that_cannot_be_made(folder: Path) -> None:
    (folder / "cache").touch()
    imported(folder)


def test_a_folder_of_another_user_is_not_used(folder: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can make another user's folder")
    cache = folder / "cache" / "mpitrain" / "bytecode"
    cache.mkdir(parents=True)
    os.chown(cache, 65534, 65534)
    imported(folder)
    assert not stored(folder)
