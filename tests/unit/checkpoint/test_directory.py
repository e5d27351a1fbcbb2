"""The checkpoints of a run: the newest undamaged one is found, and the last undamaged one is never removed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mpitrain import checkpoint
from mpitrain.checkpoint.directory import record_best
from mpitrain.core.layout import Layout
from mpitrain.errors import CheckpointError

LAYOUT = Layout.pack([("a", (7,), "param")])


def save(folder: Path, *steps: int) -> None:
    for step in steps:
        params = np.full(LAYOUT.size, step, np.float32)
        snapshot = checkpoint.Snapshot({"params": params}, step, 0)
        checkpoint.write(checkpoint.path_for(folder, step), LAYOUT, snapshot, 0, {})


def spoil(folder: Path, *steps: int) -> None:
    for step in steps:
        path = checkpoint.path_for(folder, step)
        path.write_bytes(path.read_bytes()[:-1])


def there(folder: Path) -> list[int]:
    return [*checkpoint.steps(folder)]


def test_other_files_are_no_checkpoints(tmp_path: Path) -> None:
    save(tmp_path, 3, 20)
    for name in ("step-0000000030.partial", "step-x.h5", "step-40.h5.bak", "best.h5"):
        (tmp_path / name).write_text("")
    assert there(tmp_path) == [20, 3]
    checkpoint.remove_unfinished(tmp_path)
    assert not (tmp_path / "step-0000000030.partial").exists()
    assert there(tmp_path) == [20, 3]


def test_steps_are_in_order_beyond_ten_digits(tmp_path: Path) -> None:
    save(tmp_path, 9_999_999_999, 10_000_000_000)
    assert there(tmp_path) == [10_000_000_000, 9_999_999_999]


def test_the_newest_whole_is_found_and_the_others_named(tmp_path: Path) -> None:
    params = np.zeros(LAYOUT.size, np.float32)

    def read_newest() -> tuple[tuple[Path, checkpoint.Restored] | None, list[str]]:
        paths = checkpoint.steps(tmp_path).values()
        return checkpoint.first_intact(paths, lambda path: checkpoint.read(path, LAYOUT, {"params": params}, 0))

    assert read_newest() == (None, [])
    save(tmp_path, 10, 20, 30, 40)
    assert read_newest() == ((checkpoint.path_for(tmp_path, 40), ((40, 0), {})), [])
    spoil(tmp_path, 30, 40)
    found, skipped = read_newest()
    assert found == (checkpoint.path_for(tmp_path, 20), ((20, 0), {}))
    assert (params[:7] == 20).all()
    assert ["40.h5" in skipped[0], "30.h5" in skipped[1]] == [True, True]
    spoil(tmp_path, 10, 20)
    assert read_newest()[0] is None


@pytest.mark.parametrize(
    ("keep", "every", "left"),
    [
        (0, 0, [50, 40, 30, 20, 10]),
        (1, 0, [50]),
        (2, 0, [50, 40]),
        (9, 0, [50, 40, 30, 20, 10]),
        (1, 20, [50, 40, 20]),
        (2, 30, [50, 40, 30]),
        (1, 7, [50]),
    ],
)
def test_what_is_kept(tmp_path: Path, keep: int, every: int, left: list[int]) -> None:
    save(tmp_path, 10, 20, 30, 40, 50)
    removed = checkpoint.Retention(keep, every).prune(tmp_path)
    assert there(tmp_path) == left
    assert len(removed) == 5 - len(left)


def test_the_best_checkpoint_is_kept_until_there_is_a_better_one(tmp_path: Path) -> None:
    folder, retention = tmp_path / "checkpoints", checkpoint.Retention(1)

    def add(step: int, value: float | None = None, only_best: bool = False) -> list[int]:
        save(folder, step)
        if value is not None:
            record_best(folder, checkpoint.BestCheckpoint(step, "auc", value, only_best))
        retention.prune(folder)
        return there(folder)

    with pytest.raises(CheckpointError, match="best"):
        checkpoint.find(tmp_path / "best")
    assert add(10, 0.5, only_best=True) == [10]
    assert add(20) == [20, 10]
    assert add(30, 0.6) == [30], "only the best one was kept of those before"
    assert add(40) == [40, 30]
    assert add(50) == [50, 30]
    best = checkpoint.path_for(folder, 30)
    assert checkpoint.find(tmp_path / "best") == checkpoint.find(folder / "best") == [best]
    assert checkpoint.find(tmp_path) == [checkpoint.path_for(folder, 50), best]
    (folder / "best.json").write_text("{}")
    assert checkpoint.best(folder) is None
    with pytest.raises(CheckpointError, match="best"):
        checkpoint.find(tmp_path / "best")


@pytest.mark.parametrize("only_best", [False, True])
def test_the_best_checkpoint_is_kept_when_it_is_saved_again(tmp_path: Path, only_best: bool) -> None:
    """A run that resumes from an earlier checkpoint comes to the same step."""
    for value in (0.5, 0.25):
        save(tmp_path, 10, 30)
        record_best(tmp_path, checkpoint.BestCheckpoint(30, "auc", value, only_best))
        assert there(tmp_path) == [30, 10]
        assert checkpoint.find(tmp_path / "best") == [checkpoint.path_for(tmp_path, 30)]
        checkpoint.verify(checkpoint.path_for(tmp_path, 30))


@pytest.mark.parametrize(
    ("keep", "every", "spoiled", "left"),
    [
        (1, 0, [50], [50, 40]),
        (2, 0, [50, 40], [50, 40, 30]),
        (2, 0, [50], [50, 40]),
        (1, 0, [50, 40, 30], [50, 20]),
        (1, 10, [50], [50, 40, 30, 20, 10]),
        (1, 0, [50, 40, 30, 20, 10], [50]),
    ],
)
def test_the_last_that_verifies_is_kept(
    tmp_path: Path, keep: int, every: int, spoiled: list[int], left: list[int]
) -> None:
    save(tmp_path, 10, 20, 30, 40, 50)
    spoil(tmp_path, *spoiled)
    checkpoint.Retention(keep, every).prune(tmp_path)
    assert there(tmp_path) == left


def test_what_verified_once_is_looked_at_again_when_it_has_changed(tmp_path: Path) -> None:
    retention = checkpoint.Retention(1)
    save(tmp_path, 10, 20)
    retention.prune(tmp_path)
    assert there(tmp_path) == [20]
    spoil(tmp_path, 20)
    save(tmp_path, 5, 7)
    retention.prune(tmp_path)
    assert there(tmp_path) == [20, 7]
