"""``--stage-env`` copies the Python environment to a disk of each host."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpitrain import checkpoint
from mpitrain.process import rank_status

from ..support.environments import PROGRAM, make_environment
from ..support.hosts.runs import Run
from ..support.hosts.training import Hosts
from ..support.launch import Mpi, one_line, run


@pytest.fixture
def own(mpi: Mpi, tmp_path: Path) -> Mpi:
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "disk").mkdir()
    return make_environment(tmp_path / "env", mpi)


def start(hosts: Hosts, own: Mpi, folder: Path, disk: str) -> subprocess.CompletedProcess[str]:
    words = ["--run-dir", folder / "run", "--stage-env", folder / "disk", folder / "program.py"]
    return run(
        hosts.network.run(own.python, [2, 1, 1], *words), env={**hosts.network.environment, "MPITRAIN_TEST_DISK": disk}
    )


def copies(hosts: Hosts, folder: Path) -> dict[str, list[Path]]:
    """Return the copies on the disks of the hosts; that of the first host is in ``folder``."""
    disks = {"h1": folder / "disk", **{name: hosts.network.folder / name for name in ("h2", "h3")}}
    return {name: [*disk.glob("mpitrain-*/*")] for name, disk in disks.items()}


@contextlib.contextmanager
def removed(hosts: Hosts) -> Iterator[None]:
    """Remove the copies of the hosts, which the tests of this folder share, at the end of the block."""
    try:
        yield
    finally:
        for path in hosts.network.folder.glob("h*/mpitrain-*"):
            shutil.rmtree(path)


@contextlib.contextmanager
def without_space(hosts: Hosts) -> Iterator[Path]:
    """Leave no space for a copy on the third host inside the block."""
    folder = hosts.network.folder / "h3" / "mpitrain-0"
    folder.mkdir(mode=0o700)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8k,mode=700", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_each_host_has_its_own_copy(hosts: Hosts, own: Mpi, tmp_path: Path) -> None:
    disk = str(tmp_path / "disk")
    with removed(hosts):
        done = start(hosts, own, tmp_path, disk)
        assert done.returncode == 0, done.stderr
        printed = [json.loads(line[line.index("[") :]) for line in done.stdout.splitlines()]
        assert sorted(line[0] for line in printed) == ["h1", "h1", "h2", "h3"]
        ((first,), (second,), (third,)) = copies(hosts, tmp_path).values()
        assert {line[1] for line in printed} == {str(first)}
        assert {line[3] for line in printed} == {str(first)}
        assert first.name == second.name == third.name
        names = sorted(str(path.relative_to(first)) for path in first.rglob("*") if "__pycache__" not in path.parts)
        for other in (second, third):
            assert sorted(str(p.relative_to(other)) for p in other.rglob("*") if "__pycache__" not in p.parts) == names
        # A host that has lost its copy gets one from another host, and the others keep theirs.
        shutil.rmtree(second)
        (third / "kept").touch()
        done = start(hosts, own, tmp_path, disk)
        assert done.returncode == 0, done.stderr
        assert second.is_dir() and (third / "kept").exists() and not (second / "kept").exists()


def test_a_folder_that_hosts_share_is_refused(hosts: Hosts, own: Mpi, tmp_path: Path) -> None:
    done = start(hosts, own, tmp_path, "")
    assert done.returncode == 2 and "h2" in one_line(done.stderr)
    assert not copies(hosts, tmp_path)["h1"]


def test_the_host_that_has_no_space_is_named(hosts: Hosts, own: Mpi, tmp_path: Path) -> None:
    with removed(hosts), without_space(hosts) as folder:
        done = start(hosts, own, tmp_path, str(tmp_path / "disk"))
        assert done.returncode == 2 and "h3" in one_line(done.stderr)
        assert not [*folder.iterdir()]


@pytest.mark.parametrize("has_space", [True, False])
def test_a_spare_host_gets_a_copy(
    hosts: Hosts, openmpi: Mpi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_space: bool
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    monkeypatch.setenv("MPITRAIN_TEST_DISK", str(disk))
    flags = ["--stage-env", str(disk), "--spare-hosts", "1", "--max-restarts", "2", "--save-secs", "0"]
    with removed(hosts), contextlib.nullcontext() if has_space else without_space(hosts):
        run = Run(hosts, make_environment(tmp_path / "env", openmpi), tmp_path, *flags, steps="3000")
        try:
            run.wait_until(lambda: [entry for entry in rank_status.read(run.run_dir) if entry.step > 300])
            run.gone.write_text("2\n")
            run.network.kill(2)
            status, _, errors = run.end()
        finally:
            run.process.kill()
        saved = [*checkpoint.steps(run.run_dir / "checkpoints")]
        if has_space:
            assert (status, saved) == (0, [3000]) and len(copies(hosts, tmp_path)["h3"]) == 1
        else:  # the state that was in memory is not lost
            assert status == 2 and "h3" in errors[-1]
            assert len(saved) == 1 and 0 < saved[0] < 3000
