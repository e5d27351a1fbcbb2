"""Your own training loop: a PyTorch script in which mpitrain averages the gradients.

Start it with one of these commands; without a launcher, it trains on one rank::

    mpitrain run -n 2 jobs/trainer_digits.py
    mpirun -n 2 python jobs/trainer_digits.py
    srun python jobs/trainer_digits.py    # in a batch script
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import mpitrain
from mpitrain import data

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--hidden-units", type=int, default=100)
arguments = parser.parse_args()

torch.manual_seed(0)
digits = data.mnist(None)
model = nn.Sequential(
    nn.Linear(digits.features, arguments.hidden_units), nn.ReLU(), nn.Linear(arguments.hidden_units, 10)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, arguments.epochs)
loss_of = nn.CrossEntropyLoss()
metrics = {"loss": loss_of, "accuracy": lambda outputs, labels: (outputs.argmax(1) == labels).double().mean()}

held_out = digits.validation.read_batch(0, len(digits.validation))
examples = torch.from_numpy(held_out.examples) * torch.tensor(digits.train.scale)
labels = torch.from_numpy(held_out.labels).long()
validation = DataLoader(TensorDataset(examples, labels), batch_size=256)

trainer = mpitrain.Trainer(model, optimizer, scheduler=scheduler)
loader = trainer.loader(digits.train, batch_size=32)
for epoch in trainer.epochs(arguments.epochs):
    for inputs, targets in loader:
        loss = loss_of(model(inputs), targets.long())
        trainer.backward(loss)
        trainer.step()
    if epoch % 5 == 4:
        values = trainer.evaluate(validation, metrics)
        trainer.print(f"epoch {epoch}: validation accuracy {values['accuracy']:.4f}")
