"""Files of a run outside its run directory, and files inside it that are refused."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mpitrain.errors import ConfigError, LaunchError
from mpitrain.process import host_watcher
from mpitrain.process.run_directory import check_files, make_run_dir, remove_empty


@pytest.fixture
def segments() -> Iterator[Callable[[str], Path]]:
    """A function that makes a file in /dev/shm, given the begin of its name; the files are removed after the test."""
    made: list[Path] = []

    def make(name: str) -> Path:
        made.append(Path(f"/dev/shm/{name}.{os.getpid()}.{len(made)}"))
        made[-1].write_bytes(b"x" * 4096)
        return made[-1]

    yield make
    for path in made:
        path.unlink(missing_ok=True)


def test_only_segments_that_no_process_has_mapped_are_removed(segments: Callable[[str], Path], tmp_path: Path) -> None:
    unused, other, old, used = map(segments, ("sm_segment", "dataset", "mpich_shm", "sm_segment"))
    os.utime(old, (0, time.time() - 100))
    program = "import mmap, sys; f = open(sys.argv[1], 'r+b'); m = mmap.mmap(f.fileno(), 0); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", program, used], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as user:
        assert user.stdin is not None and user.stdout is not None
        user.stdout.readline()
        host_watcher.remove_leftovers(str(tmp_path), 50.0)
        assert [path.exists() for path in (unused, other, old, used)] == [False, True, True, True]
        user.stdin.close()
    host_watcher.remove_leftovers(str(tmp_path), 50.0)
    assert not used.exists()


@pytest.mark.parametrize("prefix", ["ompi", "prted"])
def test_the_session_of_a_live_process_is_kept(prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    dead, live, other = (tmp_path / f"{prefix}.{name}" for name in (ended.pid, os.getpid(), "x"))
    for folder in (dead, live, other):
        (folder / "inner").mkdir(parents=True)
    (tmp_path / f"{prefix}.1").symlink_to(other)
    host_watcher.remove_leftovers(str(tmp_path), 50.0)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([live.name, other.name, f"{prefix}.1"])


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


def test_a_learner_has_a_directory_in_the_run_that_it_joins(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "a"
    folders = [make_run_dir("job", None, run)[0] for _ in range(2)]
    assert folders == [run / "learners" / "0", run / "learners" / "1"]
    for _ in range(2):
        assert make_run_dir("job", None, run, "3")[0] == run / "learners" / "task-3"
    with pytest.raises(ConfigError, match="--run-dir"):
        make_run_dir("job", tmp_path / "other", run)
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("element", ["", "3"])
def test_the_directory_of_a_learner_that_does_not_start_is_removed(element: str, tmp_path: Path) -> None:
    first = make_run_dir("job", None, tmp_path / "runs" / "a", element)[1]
    remove_empty(first)
    assert not [*tmp_path.iterdir()]
    make_run_dir("job", None, tmp_path / "a")
    remove_empty(make_run_dir("job", None, tmp_path / "a", element)[1])
    assert [path.name for path in (tmp_path / "a" / "learners").iterdir()] == ["0"]
