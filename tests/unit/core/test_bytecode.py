"""If Python does not write ``__pycache__``, the package stores the bytecode of its modules in the user's cache."""

from __future__ import annotations

import marshal
import os
import shutil
import sys
from pathlib import Path

import pytest

from ...support.launch import ROOT, run

ASK = "import mpitrain.plan.config as c; print(c.__file__)"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the package without compiled modules."""
    shutil.copytree(ROOT / "mpitrain", tmp_path / "mpitrain", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def import_copy(folder: Path, **environment: str) -> None:
    """Import a module of the copy of the package in a new process."""
    ours = {"PYTHONPATH": str(folder), "XDG_CACHE_HOME": str(folder / "cache"), "PYTHONDONTWRITEBYTECODE": "1"}
    done = run([sys.executable, "-c", ASK], env=ours | environment, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(folder / "mpitrain"))


def stored(folder: Path) -> list[Path]:
    return sorted((folder / "cache").rglob("mpitrain.plan.parallel-*.bin"))


def test_modules_are_compiled_once(folder: Path) -> None:
    import_copy(folder)
    (path,) = stored(folder)
    assert not list(folder.glob("mpitrain/**/__pycache__"))
    before = path.stat().st_mtime_ns
    import_copy(folder)
    assert stored(folder) == [path] and path.stat().st_mtime_ns == before


def test_changed_source_is_compiled_even_if_its_time_is_the_same(folder: Path) -> None:
    import_copy(folder)
    source = folder / "mpitrain" / "plan" / "parallel.py"
    times = source.stat().st_atime_ns, source.stat().st_mtime_ns
    source.write_text(source.read_text().replace("STALENESS = 3", "STALENESS = 4"))
    os.utime(source, ns=times)
    import_copy(folder)
    assert len(stored(folder)) == 2


@pytest.mark.parametrize("content", [b"", b"damaged", marshal.dumps(3)])
def test_damaged_code_is_compiled_again(folder: Path, content: bytes) -> None:
    import_copy(folder)
    (path,) = stored(folder)
    path.write_bytes(content)
    import_copy(folder)
    assert path.read_bytes() != content


@pytest.mark.parametrize("name", ["PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX"])
def test_the_users_choice_is_left_alone(folder: Path, name: str) -> None:
    import_copy(folder, **{name: "" if name == "PYTHONDONTWRITEBYTECODE" else str(folder / "elsewhere")})
    assert not stored(folder)


def test_a_folder_that_cannot_be_made(folder: Path) -> None:
    (folder / "cache").touch()
    import_copy(folder)


def test_code_of_another_user_is_not_executed(folder: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can make another user's file")
    import_copy(folder)
    (path,) = stored(folder)
    path.write_bytes(marshal.dumps(compile("raise SystemExit(3)", "theirs", "exec")))
    os.chown(path, 65534, 65534)
    import_copy(folder)
