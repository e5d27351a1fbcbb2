"""A script whose loop is one of several learners; it records the examples that it trains, and its last parameters."""

import json
import sys
import time
from pathlib import Path

import torch
from torch import nn

import mpitrain

folder, pause_s, dtype = Path(sys.argv[1]), float(sys.argv[2]), getattr(torch, sys.argv[3])
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2)).to(dtype)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
trainer = mpitrain.Trainer(
    model,
    optimizer,
    scheduler=torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=20),
    scheduler_interval="epoch",
)
inputs = torch.randn(1000, 8, generator=torch.Generator().manual_seed(5)).to(dtype)
labels = (inputs.float().sum(1) > 0).long()
examples = torch.utils.data.TensorDataset(inputs, labels)
loader = trainer.loader(torch.utils.data.TensorDataset(inputs, labels, torch.arange(1000)), batch_size=10)
trained, rates, values = [], [], []
for epoch in trainer.epochs(20):
    for x, y, numbers in loader:
        trainer.backward(nn.functional.cross_entropy(model(x).float(), y))
        trainer.step()
        trained += numbers.tolist()
        time.sleep(pause_s)
    rates.append((epoch, optimizer.param_groups[0]["lr"]))
    measured = trainer.evaluate(torch.utils.data.DataLoader(examples, 100), {"loss": nn.CrossEntropyLoss()})
    values.append(measured["loss"])
params = {name: value.double().flatten().tolist() for name, value in model.state_dict().items()}
result = {"trained": trained, "rates": rates, "values": values, "params": params}
(folder / f"{trainer.size}-{trainer.rank}.json").write_text(json.dumps(result))
