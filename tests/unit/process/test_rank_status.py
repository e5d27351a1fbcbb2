"""What ranks leave in the run directory for other processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpitrain.errors import ConfigError
from mpitrain.process import rank_status


def test_modules_that_ranks_use_are_known_until_the_next_attempt(tmp_path: Path) -> None:
    assert rank_status.imports(tmp_path) == []
    rank_status.folder_of(tmp_path).mkdir()
    for module in ("torch", "torch"):
        rank_status.record_import(tmp_path, module)
    assert rank_status.imports(tmp_path) == ["torch"]
    rank_status.clear(tmp_path)
    assert rank_status.imports(tmp_path) == []


@pytest.mark.parametrize(("errors", "known"), [(("a", "a"), True), (("a", "b"), False), (("", "a"), False)])
def test_only_the_lowest_of_ranks_with_the_same_error_reports_it(
    tmp_path: Path, errors: tuple[str, str], known: bool
) -> None:
    files = [rank_status.RankStatusFile(tmp_path, rank) for rank in range(2)]
    for file, error in zip(files, errors, strict=True):
        if error:
            file.set_failed(ConfigError(error), is_user_error=True)
    assert files[1].has_lower_rank_failed_alike() is known
    assert not files[0].has_lower_rank_failed_alike()
