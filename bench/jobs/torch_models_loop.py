"""Train a module of ``bench/jobs/torch_models.py`` in a loop of this script; run by ``bench/torch_models.py``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
import torch_models as models

import mpitrain
from mpitrain import data

parser = argparse.ArgumentParser()
parser.add_argument("--model", required=True)
parser.add_argument("--train-steps", type=int, required=True)
arguments = parser.parse_args()

torch.manual_seed(0)
model = models.module_of(arguments.model)
trainer = mpitrain.Trainer(model, torch.optim.Adam(model.parameters(), 1e-3))
examples, labels = models.arrays_of(arguments.model)
batch = models.BATCH[arguments.model]
loader = trainer.loader(data.from_arrays(examples, labels), batch)
epochs = -(-arguments.train_steps * batch * trainer.size // len(examples))
step = 0
for _ in trainer.epochs(epochs):
    for inputs, targets in loader:
        trainer.backward(models.loss_of(model(inputs), targets))
        step += 1
        if step == arguments.train_steps:
            trainer.stop()
        trainer.step()
