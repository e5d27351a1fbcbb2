"""What ranks leave in the run directory for other processes."""

from __future__ import annotations

from pathlib import Path

from mpitrain.process import rank_status


def test_modules_that_ranks_use_are_known_until_the_next_attempt(tmp_path: Path) -> None:
    assert rank_status.imports(tmp_path) == []
    rank_status.folder_of(tmp_path).mkdir()
    for module in ("torch", "torch"):
        rank_status.record_import(tmp_path, module)
    assert rank_status.imports(tmp_path) == ["torch"]
    rank_status.clear(tmp_path)
    assert rank_status.imports(tmp_path) == []
