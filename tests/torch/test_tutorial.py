"""The chapters of the tutorial that one machine can run: their commands print the output that the pages show."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..support.pages import Page, tutorial


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a reader."""
    return tmp_path_factory.mktemp("tutorial")


def test_chapters(folder: Path) -> None:
    for name, least in (
        ("first_run", 7),
        ("torch_module", 6),
        ("own_data", 6),
        ("parameter_servers", 3),
        ("learners", 3),
    ):
        assert Page(tutorial(name), folder).execute() >= least
