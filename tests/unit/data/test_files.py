"""Indexes of files in the cache."""

import multiprocessing
import os
import time

import numpy as np
import pytest

from mpitrain import data
from mpitrain.data.files import UnchangedFile
from mpitrain.errors import DataError


def index_at_the_same_time(path, calls, started, together, fails):
    def make(_):
        is_first = not calls.exists()
        with open(calls, "a") as file:
            file.write("x")
        if is_first:
            time.sleep(0.5)
        elif fails:  # waiting processes must fail at the same time, not one after another
            together.wait(20)
        if fails:
            raise DataError("damaged")
        return np.arange(3)

    started.wait(20)
    try:
        result = UnchangedFile(path).index("kind", make).tolist()
    except DataError:
        result = None
    assert result == (None if fails else [0, 1, 2])


def test_patterns_with_folders_at_any_depth(tmp_path):
    for name in ("a.csv", "y=1/b.csv", "y=1/m=2/c.csv"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x,y\n1,2\n")
    split = data.csv(f"{tmp_path}/**/*.csv")
    assert len(split) == 3 and "y=1" in split.note


def test_an_index_of_another_file_with_the_same_size_and_time(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "a"
    for content in (b"1", b"2"):
        path.unlink(missing_ok=True)
        path.write_bytes(content)
        os.utime(path, (0, 0))
        assert UnchangedFile(path).index("kind", lambda file: np.array([int(file.read_bytes())])) == int(content)


@pytest.mark.parametrize("fails", [False, True])
def test_one_process_makes_an_index(tmp_path, monkeypatch, fails):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path, calls = tmp_path / "a", tmp_path / "calls"
    path.write_bytes(b"content")
    context = multiprocessing.get_context("fork")
    arguments = path, calls, context.Barrier(4), context.Barrier(3), fails
    processes = [context.Process(target=index_at_the_same_time, args=arguments) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * 4
    assert len(calls.read_text()) == (4 if fails else 1)
