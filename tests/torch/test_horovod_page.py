"""The programs of ``docs/horovod.md`` run without changes, and its table names the whole API."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import mpitrain.horovod.torch as hvd

from ..support.launch import ROOT, Mpi

PAGE = (ROOT / "docs" / "horovod.md").read_text("utf-8")
PROGRAMS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def test_the_table_names_the_whole_api() -> None:
    words = set(re.findall(r"`(?:elastic\.|Compression\.)?(\w+)`", PAGE))
    names = {name for name in hvd.__all__ if name not in ("elastic", "mpi_ops", "Compression")}
    grouped = {f"grouped_{name}" for name in words}
    assert names - words - grouped == set()
    assert set(hvd.elastic.__all__) - words == set()


@pytest.mark.parametrize(("index", "expected"), [(0, r"loss (\d+\.\d+)"), (1, "steps (100)")])
def test_programs(openmpi: Mpi, tmp_path: Path, index: int, expected: str) -> None:
    path = tmp_path / "program.py"
    path.write_text(PROGRAMS[index])
    done = openmpi.run(2, path)
    assert done.returncode == 0, done.stderr
    match = re.fullmatch(expected, done.stdout.strip())
    assert match is not None and float(match[1]) < (2.0 if index == 0 else 101)
