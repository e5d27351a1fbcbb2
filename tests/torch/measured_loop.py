"""Trains the classifier of ``measured.py`` with a loop; each rank prints its metrics as one line of JSON."""

import argparse
import json

import torch
from measured import N_VALIDATION, make_model, metrics, of_sklearn, splits
from torch import nn
from torch.utils.data import DataLoader, Subset

import mpitrain

parser = argparse.ArgumentParser()
parser.add_argument("--wrong", default="")
parser.add_argument("--batch-size", type=int, default=12)
wrong, batch_size = vars(parser.parse_args()).values()
model = make_model()
trainer = mpitrain.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.05), dtype="float64")
train, validation = splits()
loader = trainer.loader(train, batch_size // trainer.size)
if wrong == "shares":
    validation = Subset(validation, range(trainer.rank, N_VALIDATION, trainer.size))
if wrong == "entries":
    validation = [{"image": inputs, "labels": label} for inputs, label in validation]
batches = DataLoader(validation, batch_size=7, shuffle=wrong == "shuffle")
measured = {**metrics(), "loss": nn.CrossEntropyLoss()}
values, stopping = [], []
for epoch in trainer.epochs(3):
    for inputs, labels in loader:
        loss = nn.functional.cross_entropy(model(inputs), labels)
        if wrong == "middle":
            trainer.evaluate(batches, measured)
        trainer.backward(loss)
        trainer.step()
        if wrong == "stop" and epoch == 1:
            trainer.stop()
    if wrong == "stop" and trainer.is_stopping:
        continue
    stopping.append(trainer.is_stopping)
    values.append(trainer.evaluate(batches, measured))
    assert model.training
    trainer.log({"loss": 1} if wrong == "name" else {"epoch": epoch, "half": torch.tensor(0.5)})
values.append(trainer.evaluate(batches, measured))
with torch.no_grad():
    inputs, labels = validation.tensors
    expected = of_sklearn(model.eval()(inputs), labels)
print(json.dumps({"values": values, "expected": expected, "stopping": stopping}), flush=True)
