"""Which files outside a run directory count as a run's own, and how they are removed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from mpitrain.process import host_watcher, rank_status


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
