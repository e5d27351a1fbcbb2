"""``mpitrain stacks``: the runs that have ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpitrain.errors import RecordError
from mpitrain.report.stacks import stacks_command


def test_of_a_run_of_learners_a_learner_must_be_given(tmp_path: Path) -> None:
    learner = tmp_path / "learners" / "task-3"
    for folder in (learner, tmp_path):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.toml").touch()
        (folder / "ranks.txt").write_text("rank\n0\n")
    with pytest.raises(RecordError, match=str(learner)):
        stacks_command.main([str(tmp_path)], standalone_mode=False)
