"""The programs of ``docs/torch_backend.md`` run without changes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ..support.launch import ROOT, Mpi

PROGRAMS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "torch_backend.md").read_text("utf-8"), re.DOTALL)


@pytest.fixture
def program(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAMS[request.param])
    return path


@pytest.mark.parametrize("program", [0], indirect=True)
def test_first_program(openmpi: Mpi, program: Path) -> None:
    done = openmpi.run(2, program)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["rank 0 of 2: 3.0", "rank 1 of 2: 3.0"]


@pytest.mark.parametrize("program", [1], indirect=True)
def test_fsdp2_learns(openmpi: Mpi, program: Path) -> None:
    done = openmpi.run(2, program)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[-1]) < 2.0  # 20 before training
