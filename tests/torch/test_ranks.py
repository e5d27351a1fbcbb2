"""Rows of the table of features that need several workers: control flow, threads, refused modes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from mpitrain.data.permutation import order
from mpitrain.errors import ConfigError
from mpitrain.plan.config import RunConfig
from mpitrain.plan.plan import make_plan

from ..support.world.controller import World
from . import branching, models, support

STEPS, BATCH = 20, 4


def routes(step: int) -> tuple[int, ...]:
    """Return the branches for the batches of two ranks in this step."""
    chosen = order(step * 2 * BATCH, 2 * BATCH, models.EXAMPLES, support.SEED, None)
    x = torch.from_numpy(models.arrays("mlp")[0][chosen])
    return tuple(map(branching.route, x.split(BATCH)))


def test_ranks_may_use_other_layers_in_another_order(world: World, tmp_path: Path) -> None:
    assert len({routes(step) for step in range(STEPS)}) > 3
    flags = ("--dtype", "float64", "--bucket-bytes", "0", "--threads", "3")
    stored = support.train(world, 2, tmp_path, *flags, job=branching.JOB)
    single = support.Local(branching.job, batch_size=2 * BATCH, accumulate_steps=2)
    single.train(STEPS)
    for name, value in single.state().items():
        np.testing.assert_allclose(stored[f"params/{name}"], value, atol=1e-12, rtol=0, err_msg=name)
    assert stored["buffers/threads"] == 3


@pytest.mark.parametrize("mode", ["async", "ssp", "backup"])
def test_statistics_over_all_workers_need_workers_in_step(mode: str) -> None:
    config = RunConfig.of(mode=mode, batch_size=BATCH, train_steps=STEPS)
    make_plan(models.job("cnn", normalize="own"), config, 2)
    with pytest.raises(ConfigError):
        make_plan(models.job("cnn", normalize="sync"), config, 2)
