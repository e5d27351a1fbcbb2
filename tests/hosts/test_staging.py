"""``--stage-env`` copies the Python environment to a disk of each host."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from ..support.environments import PROGRAM, make_environment
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


def test_each_host_has_its_own_copy(hosts: Hosts, own: Mpi, tmp_path: Path) -> None:
    disk = str(tmp_path / "disk")
    try:
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
    finally:
        for path in hosts.network.folder.glob("h*/mpitrain-*"):
            shutil.rmtree(path)


def test_a_folder_that_hosts_share_is_refused(hosts: Hosts, own: Mpi, tmp_path: Path) -> None:
    done = start(hosts, own, tmp_path, "")
    assert done.returncode == 2 and "h2" in one_line(done.stderr)
    assert not copies(hosts, tmp_path)["h1"]


def test_the_host_that_has_no_space_is_named(hosts: Hosts, own: Mpi, tmp_path: Path) -> None:
    blocked = hosts.network.folder / "h3" / "mpitrain-0"
    blocked.mkdir(mode=0o700)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8k,mode=700", "tmpfs", str(blocked)], check=True)
    try:
        done = start(hosts, own, tmp_path, str(tmp_path / "disk"))
        assert done.returncode == 2 and "h3" in one_line(done.stderr)
        assert not [*blocked.iterdir()]
    finally:
        subprocess.run(["umount", str(blocked)], check=True)
        for path in hosts.network.folder.glob("h*/mpitrain-*"):
            shutil.rmtree(path)
