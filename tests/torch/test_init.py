"""Projects of ``mpitrain init`` that use PyTorch work without changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..support.launch import Mpi
from ..support.projects import make_project


@pytest.mark.parametrize("kind", ["torch", "script"])
def test_a_project_with_pytorch(openmpi: Mpi, kind: str, tmp_path: Path) -> None:
    make_project(openmpi, tmp_path / "project", kind)
