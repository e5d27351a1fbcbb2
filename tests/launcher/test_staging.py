"""``--stage-env``: ranks start from a copy of the Python environment."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from ..support.environments import PROGRAM, make_environment
from ..support.launch import JOBS, LAUNCHER_ENVIRONMENT, ROOT, Mpi, missing, one_line, run
from ..support.waiting import limit, wait_until


@pytest.fixture
def own(mpi: Mpi, tmp_path: Path) -> Mpi:
    (tmp_path / "program.py").write_text(PROGRAM)
    return make_environment(tmp_path / "env", mpi)


def command(own: Mpi, folder: Path, *words: object) -> list[str]:
    return [str(own.python), "-m", "mpitrain", "run", "-n", "2", "--stage-env", str(folder), *map(str, words)]


def ranks(own: Mpi, folder: Path, *words: object, cwd: Path = ROOT) -> list[list[str]]:
    """Return what each rank has printed."""
    environment = {"VIRTUAL_ENV": str(own.python.parents[1].resolve())}
    done = run(command(own, folder, "--run-dir", folder.parent / "run", *words), env=environment, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return [json.loads(line.partition("[")[1] + line.partition("[")[2]) for line in done.stdout.splitlines()]


def test_everything_starts_from_the_copy(own: Mpi, tmp_path: Path) -> None:
    local = tmp_path / "local"
    printed = ranks(own, local, tmp_path / "program.py")
    (copy,) = (local / f"mpitrain-{os.getuid()}").iterdir()
    (module,) = copy.glob("lib/python*/site-packages/own.py")
    assert [line[1:] for line in printed] == [[str(copy), str(module), str(copy), str(copy)]] * 2
    made = copy.stat().st_mtime_ns, copy.stat().st_ino
    for python in ("python", own.python, own.python.with_name("python3"), "env/bin/python"):
        printed = ranks(own, local, "--", python, tmp_path / "program.py", cwd=tmp_path)
        assert {line[1] for line in printed} == {str(copy)}
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


def test_a_copy_is_used_until_packages_change(mpi: Mpi, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    own = make_environment(tmp_path, mpi)  # in the folder of a project
    (packages,) = (tmp_path / "lib").glob("python*/site-packages")
    for name in ("package", "package-1.dist-info"):
        (packages / name).mkdir()

    def copy() -> str:
        return ranks(own, tmp_path / "local", tmp_path / "program.py")[0][1]

    first = copy()
    (tmp_path / "results").touch()
    (packages / "package" / "__pycache__").mkdir()
    assert copy() == first
    os.utime(packages / "package-1.dist-info")  # the same version is installed again
    assert copy() != first


def test_a_link_to_an_environment_and_a_folder_with_spaces(own: Mpi, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("env")
    local = tmp_path / "a lócal 'folder'"
    printed = ranks(Mpi(own.name, tmp_path / "link" / "bin" / "python"), local, tmp_path / "program.py")
    (copy,) = (local / f"mpitrain-{os.getuid()}").iterdir()
    assert [[line[1], line[3], line[4]] for line in printed] == [[str(copy)] * 3] * 2


def test_commands_of_the_copy(own: Mpi, tmp_path: Path) -> None:
    scripts = own.python.parent
    starts = {
        "plain": f"#!{scripts}/python\n",
        "with-arguments": f"#!{scripts}/python -E\n",
        "pip": f"#!/bin/sh\n'''exec' \"{scripts}/python\" \"$0\" \"$@\"\n' '''\n",
        "uv": f"#!/bin/sh\n'''exec' '{scripts}/python' \"$0\" \"$@\"\n' '''\n",
        "unquoted": f"#!/bin/sh\n'''exec' {scripts}/python \"$0\" \"$@\"\n' '''\n",
        "conda": f"#!/bin/sh\n'''exec' '{scripts}/python' \"$0\" \"$@\" #'''\n",
        "other": f"#!{scripts}/sh\n''':'\nexec python \"$0\"\n'''\n",
        "env": "#!/usr/bin/env python\n",
    }
    (scripts / "sh").symlink_to("/bin/sh")
    for name, start in starts.items():
        (scripts / name).write_text(f"{start}import json, sys\nprint(json.dumps([sys.prefix, len(sys.argv)]))\n")
        (scripts / name).chmod(0o555)
    for local in (tmp_path / "local", tmp_path / ("long" * 40) / ("folder" * 30)):
        done = run([str(own.python), "-m", "mpitrain", "stage", str(local)])
        assert done.returncode == 0, done.stderr
        copied = Path(done.stdout.strip()).parent
        for name in starts:
            assert (copied / name).stat().st_mode == (scripts / name).stat().st_mode
            if name != "other" or local.name == "local":  # which starts no Python in its first lines
                done = run([str(copied / name), "a b"], env={"PATH": f"{copied}:{os.environ['PATH']}"})
                assert json.loads(done.stdout) == [str(copied.parent), 1 if name == "other" else 2], name


def test_a_folder_in_the_environment(own: Mpi, tmp_path: Path) -> None:
    local = own.python.parents[1] / "lib" / "local"
    printed = ranks(own, local, tmp_path / "program.py")
    (copy,) = (local / f"mpitrain-{os.getuid()}").iterdir()
    assert {line[1] for line in printed} == {str(copy)}
    assert not [*copy.rglob(f"mpitrain-{os.getuid()}")]


def test_output_that_the_launcher_marks(own: Mpi, tmp_path: Path) -> None:
    marks = {"openmpi": "--output tag", "mpich": "-prepend-rank"}[own.name]
    words = command(own, tmp_path / "local", "--run-dir", tmp_path / "run", "--launcher-args", marks)
    done = run([*words, str(tmp_path / "program.py")])
    assert done.returncode == 0, done.stderr
    (copy,) = (tmp_path / "local" / f"mpitrain-{os.getuid()}").iterdir()
    assert done.stdout.count(f'"{copy}", "{copy}/') == 2
    (tmp_path / "local" / f"mpitrain-{os.getuid()}").chmod(0o777)
    done = run([*words, str(tmp_path / "program.py")])
    assert done.returncode == 2 and str(tmp_path / "local") in one_line(done.stderr)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_ends_while_it_copies(own: Mpi, tmp_path: Path, number: signal.Signals) -> None:
    parent = tmp_path / "local" / f"mpitrain-{os.getuid()}"
    for index in range(20_000):
        (own.python.parents[1] / "lib" / f"{index}.so").touch()
    words = command(own, tmp_path / "local", "--run-dir", tmp_path / "run", tmp_path / "program.py")
    process = subprocess.Popen(words, env={**os.environ, **LAUNCHER_ENVIRONMENT}, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: [*parent.glob(".partial-*/lib/*")], "a file is copied", process=process)
        process.send_signal(number)
        status = process.wait(limit(30))
    finally:
        process.kill()
    assert status == (128 + number if number == signal.SIGTERM else -number)

    def is_alone() -> bool:
        done = run([str(own.python), "-m", "mpitrain", "stage", str(tmp_path / "local")])
        assert done.returncode == 0, done.stderr
        return [*parent.iterdir()] == [Path(done.stdout.strip()).parents[1]]

    wait_until(is_alone, "only the next copy is left")  # when the processes of the first one have ended


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
