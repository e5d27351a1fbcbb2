"""Random transforms depend only on the position of an example in the run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ..support.launch import JOBS
from ..support.results import GLOBAL_BATCH, assert_close, final
from ..support.world.controller import World


def train(world: World, n: int, run_dir: Path, *flags: str) -> dict[str, np.ndarray]:
    batch = str(GLOBAL_BATCH // n)
    world.train(n, JOBS / "augmented.py", "--dtype", "float64", "--run-dir", run_dir, "--batch-size", batch, *flags)
    return final(run_dir)


@pytest.mark.parametrize("flags", [(), ("--data-workers", "2")])
@pytest.mark.parametrize("n", [2, 3])
def test_n_ranks_train_on_the_same_examples_as_one(
    world: World, n: int, flags: tuple[str, ...], tmp_path: Path
) -> None:
    assert_close(train(world, n, tmp_path / "n", *flags), train(world, 1, tmp_path / "1"), 1e-12)
