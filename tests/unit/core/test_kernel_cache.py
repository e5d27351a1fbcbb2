"""Compiled kernels on disk."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_DTYPES = ("float32", "float64", "int32", "int64")

# Prints the result's type and value, and how many signatures were loaded from the cache.
_PROGRAM = """
import sys
import numpy as np
from mpitrain.core.kernels import kernel, sum_rows
for dtype in sys.argv[1:]:
    rows, out = np.ones((2, 3), dtype), np.zeros(3, dtype)
    sum_rows(rows, np.arange(2), 0, 3, 2.0, out)
    print(out.dtype, out.tolist() == [4, 4, 4], sum(sum_rows.stats.cache_hits.values()))
"""

# Prints a parameter after a step of each rule; both kernels have the same types and closures of equal names.
_RULES = """
import numpy as np
from mpitrain import optim
from mpitrain.core.layout import Layout
for nesterov in (False, True):
    params, velocity = np.zeros(1, np.float32), np.ones(1, np.float32)
    layout = Layout.pack([("all.weight", (1,), "param")])
    rule = optim.momentum(1.0, 0.5, nesterov)
    optim.Updater(rule, layout, params, {"velocity": velocity}).update_all(np.ones(1, np.float32), 0)
    print(params[0], sum(rule.fused(1.0, 0)[0].update_segments.stats.cache_hits.values()))
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "mpitrain"


def start(*dtypes: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", _PROGRAM, *dtypes], stdout=subprocess.PIPE, text=True)


def output(process: subprocess.Popen[str]) -> list[list[str]]:
    text, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    return [line.split() for line in text.splitlines()]


def test_processes_that_compile_at_the_same_time_store_every_signature(cache: Path) -> None:
    compiling = [start(dtype) for dtype in _DTYPES]
    assert [output(process) for process in compiling] == [[[dtype, "True", "0"]] for dtype in _DTYPES]
    loaded = output(start(*_DTYPES))
    assert loaded == [[dtype, "True", str(hits)] for hits, dtype in enumerate(_DTYPES, 1)]
    assert len(list(cache.rglob("*sum_rows*.bin"))) == len(_DTYPES)


def test_a_damaged_file_is_compiled_again(cache: Path) -> None:
    output(start("float32"))
    (file,) = cache.rglob("*sum_rows*.bin")
    file.write_bytes(file.read_bytes()[:-1])
    assert output(start("float32")) == [["float32", "True", "0"]]
    assert output(start("float32")) == [["float32", "True", "1"]]


def test_a_directory_that_cannot_be_written_is_no_error(cache: Path) -> None:
    cache.write_text("")  # root can write to every directory, but a file is no directory
    assert output(start("float32")) == [["float32", "True", "0"]]


def test_kernels_that_differ_in_their_closure_are_stored_separately(cache: Path) -> None:
    for hits in ("0", "1"):
        process = subprocess.Popen([sys.executable, "-c", _RULES], stdout=subprocess.PIPE, text=True)
        assert output(process) == [["-1.5", hits], ["-1.75", hits]]
    assert len(list(cache.rglob("*update_segments*.bin"))) == 2
