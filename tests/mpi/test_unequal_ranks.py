"""Ranks with different data or different speed."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpitrain.monitor.goodput import accounts_in
from mpitrain.monitor.metrics import read_lines

from ..support.launch import Mpi
from ..support.world.controller import World

HEAD = """
import os, time
import numpy as np
from mpitrain import Job, data, nn, optim
from mpitrain.process.launcher_env import launched_rank
from mpitrain.training import slow_workers

def job_of(x, y, *layers):
    return Job(
        model=nn.Sequential(*layers, nn.Dense(4, 3)),
        loss=nn.SoftmaxCrossEntropy(),
        optimizer=optim.sgd(0.1),
        train=data.from_arrays(x, y),
        batch_size=4,
        train_steps=100,
    )
"""
UNSEEDED = """
def job():
    rng = np.random.default_rng()
    return job_of(rng.standard_normal((100, 4)), rng.integers(0, 3, 100))
"""
SLOW = """
slow_workers.PERIOD_S = 0.4

class Slow(nn.Layer):
    def forward(self, x, ctx):
        time.sleep(0.02 if launched_rank(os.environ) == 1 else 0.001)
        return x

    def backward(self, dy):
        return dy

def job():
    return job_of(np.ones((100, 4), np.float32), np.zeros(100, np.int64), Slow())
"""


def test_different_data_is_reported_before_training(world: World, tmp_path: Path) -> None:
    path = tmp_path / "unseeded.py"
    path.write_text(HEAD + UNSEEDED)
    assert "the training examples" in world.refusal(2, path, "--run-dir", tmp_path / "run")
    assert not (tmp_path / "run" / "config.toml").exists()


@pytest.mark.parametrize("flags", [(), ("--mode", "local", "--local-steps", "2")], ids=["sync", "local"])
def test_a_slow_worker_is_reported_once(openmpi: Mpi, flags: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "slow.py"
    path.write_text(HEAD + SLOW)
    done = openmpi.run(2, "-m", "mpitrain", "train", path, *flags, "--run-dir", tmp_path / "run")
    assert done.returncode == 0
    assert sum("worker 1 on" in line for line in done.stderr.splitlines()) == 1
    account = accounts_in(read_lines(tmp_path / "run" / "metrics.jsonl"))[-1]
    assert sum(account.seconds.values()) == pytest.approx(account.at - account.since, abs=0.5)
    # One of two workers waits 19 ms in each of 100 steps; those of the first period do not count.
    assert 0.4 < account.seconds["waiting"] < account.seconds["steps"]
