"""A Trainer's loop that clips its gradients, for ``bench/same_bits.py``: python clipped_loop.py STEPS."""

import sys

import torch
from torch import nn

import mpitrain
from mpitrain import data

torch.manual_seed(0)
digits = data.mnist(None)
model = nn.Sequential(nn.Linear(digits.features, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, int(sys.argv[1]))
trainer = mpitrain.Trainer(model, optimizer, scheduler=scheduler, scheduler_interval="step")
trainer.loader(digits.train, batch_size=16)
for _, (inputs, labels) in trainer.batches(int(sys.argv[1])):
    trainer.backward(nn.functional.cross_entropy(model(inputs), labels))
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    trainer.step()
