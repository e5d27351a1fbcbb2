"""Pages whose commands are executed: the commands print the output that the pages show."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..support.launch import ROOT
from ..support.pages import Page

COMMANDS = {"tensorflow": 1, "mpi4py": 3, "testing": 3, "reference/configuration": 4}


@pytest.mark.parametrize(("name", "least"), COMMANDS.items())
def test_page(name: str, least: int, tmp_path: Path) -> None:
    assert Page(ROOT / "docs" / f"{name}.md", tmp_path).execute() >= least
