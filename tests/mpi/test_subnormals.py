"""Runs treat subnormal numbers as zero unless this is turned off; trained models compute like their runs."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest

import mpitrain
from mpitrain.core import subnormals

from ..support.world.controller import World

# The first feature is zero in all examples but the first, so the optimizer's moments for its weights decay.
JOB = """
import numpy as np
from mpitrain import Job, data, nn, optim
from mpitrain.data.permutation import order

def job() -> Job:
    count = 40_000
    examples = np.zeros((count, 3), np.float32)
    examples[:, 1:] = np.random.default_rng(0).normal(size=(count, 2))
    examples[order(0, 1, count, 0)[0], 0] = 1
    labels = (examples[:, 1] > 0).astype(np.int64)
    return Job(
        model=nn.Sequential(nn.Dense(3, 2)),
        loss=nn.SoftmaxCrossEntropy(),
        optimizer=optim.adam(0.001, beta1=0.8),
        train=data.from_arrays(examples, labels),
        batch_size=20,
        train_steps=450,
    )
"""


@pytest.mark.parametrize("flushes", [True, False])
@pytest.mark.parametrize("mode", [["--mode", "sync"], ["--mode", "async", "--ps", "1"]], ids=["sync", "async"])
def test_moments_of_a_rare_feature(world: World, job, mode: list[str], flushes: bool, tmp_path: Path) -> None:
    flag = [] if flushes else ["--no-flush-denormals"]
    world.train(2, job(JOB), "--run-dir", tmp_path / "run", *mode, *flag)
    with h5py.File(tmp_path / "run" / "checkpoints" / "step-0000000450.h5") as file:
        arrays: list[np.ndarray] = []
        file.visititems(lambda _, item: arrays.append(item[()]) if isinstance(item, h5py.Dataset) else None)
    bits = [np.abs(array).view(np.uint32) for array in arrays if array.dtype == np.float32]
    assert bits and any(np.any((each > 0) & (each < 0x00800000)) for each in bits) is not flushes
    model = mpitrain.load(tmp_path / "run")
    seen: list[bool] = []
    predict = model._predictor._model.predict
    model._predictor._model.predict = lambda batch: seen.append(subnormals.are_flushed()) or predict(batch)
    model(np.zeros((1, 3), np.float32))
    assert seen == [flushes] and not subnormals.are_flushed()
