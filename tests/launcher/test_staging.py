"""``--stage-env``: ranks start from a copy of the Python environment."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from ..support.environments import PROGRAM, make_environment
from ..support.launch import JOBS, LAUNCHER_ENVIRONMENT, Mpi, missing, one_line, run
from ..support.waiting import limit


@pytest.fixture
def own(mpi: Mpi, tmp_path: Path) -> Mpi:
    (tmp_path / "program.py").write_text(PROGRAM)
    return make_environment(tmp_path / "env", mpi)


def command(own: Mpi, folder: Path, *words: object) -> list[str]:
    return [str(own.python), "-m", "mpitrain", "run", "-n", "2", "--stage-env", str(folder), *map(str, words)]


def ranks(own: Mpi, folder: Path, *words: object) -> list[list[str]]:
    """Return what each rank has printed."""
    environment = {"VIRTUAL_ENV": str(own.python.parent.parent)}
    done = run(command(own, folder, "--run-dir", folder.parent / "run", *words), env=environment)
    assert done.returncode == 0, done.stderr
    return [json.loads(line.partition("[")[1] + line.partition("[")[2]) for line in done.stdout.splitlines()]


def test_everything_starts_from_the_copy(own: Mpi, tmp_path: Path) -> None:
    local = tmp_path / "local"
    printed = ranks(own, local, tmp_path / "program.py")
    (copy,) = (local / f"mpitrain-{os.getuid()}").iterdir()
    (module,) = copy.glob("lib/python*/site-packages/own.py")
    assert [line[1:] for line in printed] == [[str(copy), str(module), str(copy), str(copy)]] * 2
    made = copy.stat().st_mtime_ns, copy.stat().st_ino
    for python in ("python", own.python, own.python.with_name("python3")):
        assert {line[1] for line in ranks(own, local, "--", python, tmp_path / "program.py")} == {str(copy)}
    assert (copy.stat().st_mtime_ns, copy.stat().st_ino) == made
    (own.python.parent.parent / module.relative_to(copy)).with_name("other.py").write_text("")  # is installed
    (prefix,) = {line[1] for line in ranks(own, local, tmp_path / "program.py")}
    assert prefix != str(copy) and Path(prefix).is_dir() and copy.is_dir()  # a run may still use the first one


def test_a_job_trains_from_the_copy(own: Mpi, tmp_path: Path) -> None:
    words = command(own, tmp_path / "local", "--train-steps", "20", "--run-dir", tmp_path / "run", JOBS / "small.py")
    done = run(words)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run" / "status.json").read_text())["state"] == "finished"


def test_several_copies_at_once_and_interrupted_ones(own: Mpi, tmp_path: Path) -> None:
    parent = tmp_path / "local" / f"mpitrain-{os.getuid()}"
    left = parent / f".partial-{2**22 + 1}-abc"  # of a process that has ended
    left.mkdir(parents=True, mode=0o700)
    words = [str(own.python), "-m", "mpitrain", "stage", str(tmp_path / "local")]
    environment = {**os.environ, **LAUNCHER_ENVIRONMENT}
    started = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(3)]
    printed = {process.communicate(timeout=limit(60))[0].strip() for process in started}
    assert [process.returncode for process in started] == [0, 0, 0]
    (copy,) = parent.iterdir()
    assert printed == {str(copy / "bin" / "python")}


def test_an_environment_in_the_folder_of_a_project(mpi: Mpi, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "data").mkdir()
    own = make_environment(tmp_path, mpi)
    printed = ranks(own, tmp_path / "local", tmp_path / "program.py")
    assert not {"data", "program.py", "local"} & {path.name for path in Path(printed[0][1]).iterdir()}


@pytest.mark.parametrize("option", ["ro", "noexec"])
def test_disks_that_are_refused(own: Mpi, tmp_path: Path, option: str) -> None:
    if os.geteuid() != 0:
        missing("root, to mount a disk")
    local = tmp_path / "local"
    local.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(local)], check=True)
    try:
        (local / "mpitrain-0").mkdir(mode=0o700)
        subprocess.run(["mount", "-o", f"remount,{option}", str(local)], check=True)
        # With several ranks: none of them may wait for one that has failed.
        done = own.run(2, "-m", "mpitrain", "stage", str(local))
        assert done.returncode == 2 and str(local) in one_line(done.stderr)
    finally:
        subprocess.run(["umount", str(local)], check=True)


@pytest.mark.parametrize("kind", ["file", "not writable by the user alone", "link"])
def test_folders_that_are_refused(own: Mpi, tmp_path: Path, kind: str) -> None:
    local, name = tmp_path / "local", f"mpitrain-{os.getuid()}"
    local.mkdir()
    if kind == "file":
        (local / name).touch()
    elif kind == "link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        (local / name).symlink_to(tmp_path / "elsewhere")
    else:
        (local / name).mkdir()
        (local / name).chmod(0o777)
    done = run(command(own, local, "--run-dir", tmp_path / "run", tmp_path / "program.py"))
    assert done.returncode == 2 and str(local) in one_line(done.stderr)
    assert [path.name for path in local.iterdir()] == [name]
