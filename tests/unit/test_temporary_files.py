"""Which files outside a run directory count as a run's own, and which records inside are refused."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from mpitrain.errors import LaunchError
from mpitrain.process import host_watcher, rank_status
from mpitrain.process.run_directory import check_files


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/dev/shm/sm_segment.vm.0.5a4b0001.0", True),
        ("/dev/shm/mpich_shm_166f3952_0", True),
        (f"{tempfile.gettempdir()}/ompi.123", True),
        (f"{tempfile.gettempdir()}/ompi.123/x", False),
        (f"{tempfile.gettempdir()}/ompi.", False),
        (f"{tempfile.gettempdir()}/sm_segment.1", False),
        ("/dev/shm/dataset.npy", False),
        ("/dev/shm/../../home/sm_segment.1", False),
        ("/dev/shm/sm_segment.1/../x", False),
        ("/etc/passwd", False),
    ],
)
def test_only_names_of_mpi_libraries_are_temporary(path: str, expected: bool, tmp_path: Path) -> None:
    assert rank_status.is_temporary(path) == expected
    (tmp_path / ".ranks").mkdir()
    (tmp_path / ".ranks" / "temporary-0").write_text(json.dumps({"host": "a", "paths": [path]}))
    assert rank_status.read_temporary(tmp_path) == {"a": [path] if expected else []}


def test_the_session_of_a_live_process_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_watcher, "_ENDING_S", 0.1)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    file, dead, live = tmp_path / "file", tmp_path / f"ompi.{ended.pid}", tmp_path / f"ompi.{os.getpid()}"
    file.touch()
    for folder in (dead, live):
        (folder / "inner").mkdir(parents=True)
    host_watcher.remove(map(str, (file, dead, live, tmp_path / "missing", tmp_path / "ompi.x")))
    assert sorted(tmp_path.iterdir()) == [live]


@pytest.mark.parametrize("name", ["config.toml", "metrics.jsonl", "status.json", "ranks.txt", "logs", ".ranks"])
def test_records_must_not_be_links(name: str, tmp_path: Path) -> None:
    check_files(tmp_path)
    (tmp_path / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(LaunchError, match=re.escape(name)):
        check_files(tmp_path)
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    with pytest.raises(LaunchError, match=re.escape(name)):
        check_files(tmp_path)


def test_checkpoints_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").symlink_to(tmp_path / "elsewhere")
    check_files(tmp_path)
