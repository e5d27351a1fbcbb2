"""Runs of ``models.py``, and the same training in a plain torch loop."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import nn

from mpitrain import Job, checkpoint
from mpitrain.core.device import Cpu
from mpitrain.core.training_state import TrainingState
from mpitrain.data import Batch, InMemory, Loader
from mpitrain.data.permutation import order
from mpitrain.models.accumulation import GradientAccumulation
from mpitrain.models.select import make_model
from mpitrain.plan.config import RunConfig
from mpitrain.plan.plan import make_plan
from mpitrain.pytorch.batches import inputs_of

from ..support.launch import Mpi
from ..support.world.controller import World
from . import models

JOB = Path(models.__file__)
SEED = 0


def train(ranks: World | Mpi, n: int, run_dir: Path, *flags: str | Path, job: Path = JOB) -> dict[str, np.ndarray]:
    """Train on ``n`` ranks; return the arrays of the newest checkpoint."""
    ranks.train(n, job, "--run-dir", run_dir, "--threads", "1", *flags, timeout=120)
    return newest(run_dir)


def newest(run_dir: Path) -> dict[str, np.ndarray]:
    with checkpoint.Checkpoint(checkpoint.find(run_dir)[0]) as opened:
        return {name: opened.read(name) for name in opened.datasets}


def plain_loop(kind: str, batch: int, steps: int, dtype: torch.dtype, optimizer: str = "adam") -> dict[str, np.ndarray]:
    """Train in a plain torch loop, on whole batches in the order of mpitrain; return the parameters and buffers."""
    torch.manual_seed(SEED)
    model = models.make(kind).to(dtype)
    loss_of = models.loss_of(kind)
    rules = {
        "adam": lambda params: torch.optim.Adam(params, 0.01),
        "momentum": lambda params: torch.optim.SGD(params, 0.01, momentum=0.9),
    }
    rule = rules[optimizer](model.parameters())
    examples, labels = models.arrays(kind)
    for step in range(steps):
        chosen = order(step * batch, batch, len(examples), SEED, None)
        x = torch.from_numpy(examples[chosen])
        rule.zero_grad()
        loss_of(model(x if kind == "gpt" else x.to(dtype)), torch.from_numpy(labels[chosen])).backward()
        rule.step()
    return {name: value.detach().numpy() for name, value in model.state_dict().items()}


def assert_close(stored: dict[str, np.ndarray], expected: dict[str, np.ndarray], tolerance: float) -> None:
    """Compare a checkpoint's parameters and buffers with a state_dict."""
    compared = 0
    for name, value in expected.items():
        for key in {f"params/{name}", f"buffers/{name}"} & stored.keys():
            scale = max(1.0, np.abs(value).max())
            np.testing.assert_allclose(stored[key], value, atol=tolerance * scale, rtol=0, err_msg=name)
            compared += 1
    assert compared


def assert_same_bits(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].tobytes() == b[name].tobytes(), name


class Local:
    """Trains a job in this process, without MPI.

    Args:
        make: Returns the job; torch is seeded before.
        options: Options of the run.
    """

    def __init__(self, make: Callable[[], Job], **options: object) -> None:
        torch.manual_seed(SEED)
        self.job = make()
        defaults = {"batch_size": 4, "train_steps": 20, "dtype": "float64", "seed": SEED}
        self.plan = make_plan(self.job, RunConfig.of(**{**defaults, **options}), 1)
        size = self.plan.layout.size
        self.vectors = {name: np.zeros(size, self.plan.dtype) for name in self.plan.vectors}
        self.params, self.grads = self.vectors["params"], np.zeros(size, self.plan.dtype)
        self.job.network.initialize(self.plan.layout, self.params, SEED)
        devices = [Cpu(index) for index in range(self.plan.config.device.devices_per_rank)]
        self.state_of_run = TrainingState(self.plan.layout, self.job.network.frozen)
        self.model = make_model(self.job, self.plan, devices, self.state_of_run)
        self.model.bind(self.params, self.grads)
        share = self.plan.share_of(0)
        self.accumulation = GradientAccumulation(self.model, [self.grads], share.additions)
        self.micro_batches = share.micro_batches
        self.updater = self.plan.updater(self.vectors, self.state_of_run.frozen)
        split = self.job.train_split
        self.loader = split.own_loader(SEED)
        if self.loader is None:
            arrays = split.read_batch(0, len(split))
            dtype = None if self.job.network.takes_integers(split) else self.plan.dtype
            self.loader = Loader(split, InMemory(arrays.examples, arrays.labels), SEED, dtype)

    def step(self, index: int) -> float:
        """Train one step; return its loss."""
        loss = float(
            self.accumulation.forward(self.loader.batch(index * self.plan.batch, self.plan.batch), self.micro_batches)
        )
        self.starts: list[int] = []
        self.accumulation.backward(self.starts.append)
        self.updater.update_all(self.grads, index)
        return loss

    def train(self, steps: int = 20) -> list[float]:
        return [self.step(index) for index in range(steps)]

    def state(self) -> dict[str, np.ndarray]:
        """Return the parameters and averaged buffers by name."""
        return {name: view.copy() for name, view in self.plan.layout.views(self.params).items()}


def plain(make: Callable[[], Job], steps: int = 20, batch: int = 4) -> nn.Module:
    """Train the job's module in a plain torch loop with SGD, in float64; return the module."""
    torch.manual_seed(SEED)
    job = make()
    model, split = job.model, job.train_split
    job.network.lay_out(split, np.float64)  # gives lazy modules their shapes
    rule = torch.optim.SGD(model.parameters(), 0.01)
    for index in range(steps):
        chosen = order(index * batch, batch, len(split), SEED, None)
        stored = split.read_batch(0, len(split)) if split.is_array else split.load(chosen, SEED, index * batch)
        given = inputs_of(
            Batch(stored.examples[chosen], stored.labels[chosen], 0) if split.is_array else stored, np.dtype(np.float64)
        )
        rule.zero_grad()
        job.loss(model(*given.args, **given.kwargs), given.labels).backward()
        rule.step()
    return model


def assert_same_training(make: Callable[[], Job], **options: object) -> Local:
    """Train a job with ``Local`` and in a plain loop; the parameters must agree."""
    ours, theirs = Local(make, **options), plain(make)
    ours.train()
    for name, value in theirs.state_dict().items():
        if name in ours.state():
            np.testing.assert_allclose(ours.state()[name], value.detach(), atol=1e-12, rtol=0, err_msg=name)
    return ours
