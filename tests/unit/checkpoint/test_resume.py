"""The choice of the checkpoint from which a run begins."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mpitrain import checkpoint
from mpitrain.checkpoint.resume import plan_resume
from mpitrain.core.layout import Layout
from mpitrain.errors import CheckpointError
from mpitrain.plan.config import RunConfig

LAYOUT = Layout.pack([("a", (7,), "param"), ("b", (2,), "param")])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two checkpoints."""
    for step in (5, 10):
        path = checkpoint.path_for(tmp_path, step)
        checkpoint.write(path, LAYOUT, checkpoint.Snapshot({"params": np.zeros(LAYOUT.size)}, step, 0), 0, {})
    return tmp_path


def spoil(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def begin(
    folder: Path, layout: Layout = LAYOUT, **options: object
) -> tuple[tuple[Path, ...], Path | None, tuple[str, ...]]:
    found = plan_resume(RunConfig.of(**options), folder, layout)  # type: ignore[arg-type]
    assert found.saved == (found.resume != () and found.resume[0].parent == folder)
    assert found.auto == (options.get("resume", "auto") == "auto")
    return found[:3]


def test_auto_offers_all_the_newest_first(folder: Path) -> None:
    """Damage is detected later, when the checkpoints are read."""
    five, ten = (checkpoint.path_for(folder, step) for step in (5, 10))
    assert begin(folder) == ((ten, five), None, ())
    assert begin(folder, resume="never") == ((), None, ())
    assert begin(folder / "empty") == ((), None, ())


def test_a_checkpoint_that_was_asked_for(folder: Path) -> None:
    five = checkpoint.path_for(folder, 5)
    assert begin(folder / "empty", resume=str(five)) == ((five,), None, ())
    with pytest.raises(CheckpointError, match=r"--resume nowhere\.h5 .*never"):
        begin(folder, resume="nowhere.h5")
    spoil(five)
    with pytest.raises(CheckpointError, match=f"--resume {five}") as caught:
        begin(folder, resume=str(five))
    assert caught.value.exit_status == 2


def test_init_from(folder: Path) -> None:
    five = checkpoint.path_for(folder, 5)
    other = Layout.pack([("a", (7,), "param"), ("b", (3,), "param")])
    resume, init_from, notes = begin(folder / "empty", other, init_from=five)
    assert (resume, init_from) == ((), five)
    (note,) = notes
    assert note.startswith("1 of 2 parameters ") and str(five) in note
    assert "; b has shape" in note and note.index("(2,)") < note.index("(3,)")
    resume, init_from, notes = begin(folder, init_from=five)
    assert (resume[0], init_from) == (checkpoint.path_for(folder, 10), None)
    assert len(notes) == 1 and "--init-from" in notes[0]
    with pytest.raises(
        CheckpointError, match=f"--init-from {five}: .*; the model has parameter c; the file has parameters a, b"
    ):
        begin(folder / "empty", Layout.pack([("c", (7,), "param")]), init_from=five)


def test_a_directory_stands_for_its_newest_checkpoint(folder: Path) -> None:
    ten = checkpoint.path_for(folder, 10)
    assert begin(folder / "empty", resume=str(folder)) == ((ten,), None, ())
    assert begin(folder / "empty", init_from=folder)[:2] == ((), ten)
    (folder / "run").mkdir()
    with pytest.raises(CheckpointError, match=f"--init-from {folder / 'run'} contains no checkpoint"):
        begin(folder / "empty", init_from=folder / "run")


def test_never_does_not_throw_new_checkpoints_away_for_old_ones(folder: Path) -> None:
    assert begin(folder, resume="never")[0] == ()
    with pytest.raises(CheckpointError, match="another --run-dir"):
        begin(folder, resume="never", keep=2)
    assert begin(folder / "empty", resume="never", keep=2)[0] == ()
