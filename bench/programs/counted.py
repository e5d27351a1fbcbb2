"""A script for ``bench/learners.py failures``, which records the examples that it trains.

    counted.py FOLDER LEARNER

Each process appends the numbers of the examples of each step to FOLDER/LEARNER.TIME, as int32.
"""

import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import mpitrain

EXAMPLES = 6000


class Numbered(Dataset[tuple[int, Tensor, Tensor]]):
    """Random examples with random labels, which are others each time, so that steps do not become smaller."""

    def __init__(self) -> None:
        self.x = torch.randn(EXAMPLES, 784)

    def __len__(self) -> int:
        return EXAMPLES

    def __getitem__(self, index: int) -> tuple[int, Tensor, Tensor]:
        return index, self.x[index], torch.randint(10, ())


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(784, 500), nn.ReLU(), nn.Linear(500, 10))
trainer = mpitrain.Trainer(model, torch.optim.Adam(model.parameters(), 1e-3))
loader = trainer.loader(Numbered(), batch_size=100, shuffle=False)
trained = Path(sys.argv[1], f"{sys.argv[2]}.{time.time_ns()}")
for _ in trainer.epochs(100_000):
    for numbers, x, y in loader:
        trainer.backward(nn.functional.cross_entropy(model(x), y))
        trainer.step()
        with trained.open("ab") as file:
            file.write(numbers.numpy().astype("int32").tobytes())
