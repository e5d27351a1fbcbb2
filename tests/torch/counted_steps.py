"""A script that counts steps, not epochs, and copies and pickles its model while it trains."""

from __future__ import annotations

import argparse
import copy
import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

sys.path.insert(0, str(Path(__file__).parents[2]))  # imports this checkout

import mpitrain

STEPS, EXAMPLES, TOTAL = 11, 48, 12  # steps, examples of an epoch and of a step


def make() -> tuple[nn.Module, TensorDataset]:
    """Return the model, whose second layer is large, and the examples."""
    torch.manual_seed(0)
    inputs = torch.randn(EXAMPLES, 5, dtype=torch.float64)
    model = nn.Sequential(nn.Linear(5, 512), nn.Linear(512, 512), nn.Linear(512, 3)).double()
    return model, TensorDataset(inputs, inputs[:, :3].argmax(1))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kill-at", type=int)
    arguments = parser.parse_args()
    model, dataset = make()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    trainer = mpitrain.Trainer(model, optimizer, dtype="float64", threads=1)
    trainer.loader(dataset, TOTAL // trainer.size)
    steps: list[int] = []
    for step, (inputs, labels) in trainer.batches(STEPS):
        if step == arguments.kill_at and trainer.rank == 1 and steps[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        steps.append(step)
        optimizer.zero_grad()
        trainer.backward(nn.functional.cross_entropy(model(inputs), labels))
        optimizer.step()
        copied = copy.deepcopy(model)
        copied(inputs).sum().backward()
        if trainer.chief:
            torch.save(model, arguments.folder / "model.pt")
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(model.parameters(), copied.parameters(), strict=True))
    first = steps[0]  # of the newest state that was saved when a rank was killed, which depends on the speed
    assert 0 < first <= arguments.kill_at if arguments.kill_at else first == 0
    assert steps == [*range(first, STEPS)] and trainer.step_count == STEPS


if __name__ == "__main__":
    main()
