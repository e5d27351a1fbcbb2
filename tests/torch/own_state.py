"""A script that makes its own data, and stores its own state in checkpoints."""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

sys.path.insert(0, str(Path(__file__).parents[2]))  # imports this checkout

import mpitrain

STEPS = 12


class Hidden:
    """A hidden state, different on each rank."""

    def __init__(self) -> None:
        self.state = torch.zeros(3)

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.state, "bfloat16": self.state.bfloat16(), "nested": [(1, None), {"a": True, 2: "b"}]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["nested"] == [(1, None), {"a": True, 2: "b"}]
        assert torch.equal(state["bfloat16"], state["state"].bfloat16())
        self.state = state["state"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--kill-at", type=int)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.5)
    trainer = mpitrain.Trainer(model, optimizer, threads=1)
    ema, hidden = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)), Hidden()
    trainer.register("ema", ema)
    trainer.register("hidden", hidden, per_rank=True)
    trainer.state["counts"] = Counter()
    values = {"best": 0.0, "not saved": object()}
    trainer.register("values", values, keys=["best"])
    first = None
    for step in trainer.steps(STEPS):
        first = step if first is None else first
        if step == arguments.kill_at and trainer.rank == 1 and first == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        x = torch.randn(4, 3) + random.random() + torch.from_numpy(np.random.random((4, 3)).astype(np.float32))
        hidden.state = 0.5 * hidden.state + x.mean(0)
        trainer.backward((model(x) - hidden.state.sum()).square().mean())
        trainer.step()
        ema.update_parameters(model)
        trainer.state["counts"][step % 3] += 1
        values["best"] += step
    assert trainer.state["counts"] == Counter({0: 4, 1: 4, 2: 4}), trainer.state
    assert values["best"] == sum(range(STEPS))
    assert (trainer.sum(trainer.rank), trainer.mean(trainer.rank)) == (1, 0.5)
    trainer.barrier()
    states = trainer.gather(hidden.state)
    if trainer.chief:
        averaged = [value.detach().numpy() for value in ema.state_dict().values()]
        np.savez(arguments.out, *(value.detach().numpy() for value in model.parameters()), *averaged, *states)
        # It resumes from the newest state that was saved when a rank was killed, which depends on the speed.
        assert 0 < first <= arguments.kill_at if arguments.kill_at else first == 0


if __name__ == "__main__":
    main()
