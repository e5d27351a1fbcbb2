"""Trains a small network with Horovod's API; rank 0 prints the parameters as JSON.

    python horovod_training.py OPTIONS

OPTIONS is a JSON object: keyword arguments of ``DistributedOptimizer``, the number of ``rows`` of the global batch, and
the class of the ``optimizer``.
"""

from __future__ import annotations

import json
import sys

import torch
from torch import nn

import mpitrain.horovod.torch as hvd

hvd.init()
torch.set_num_threads(1)
options = json.loads(sys.argv[1])
rows, kind = options.pop("rows"), options.pop("optimizer")
if "op" in options:
    options["op"] = getattr(hvd, options["op"])
torch.manual_seed(hvd.rank())  # all ranks get the parameters of rank 0
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.05)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
if kind != "LBFGS":
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), **options)
data = torch.randn(rows, 6, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
passes = options.get("backward_passes_per_step", 1)
losses: list[float] = []  # that ``step`` returns
for step in range(5):
    share = rows // hvd.size()
    own = (data + step)[hvd.rank() * share : (hvd.rank() + 1) * share]

    def compute(own: torch.Tensor = own) -> torch.Tensor:
        optimizer.zero_grad()
        for part in own.chunk(passes):
            loss = model(part).square().mean() / passes
            loss.backward()
        return loss

    if kind == "LBFGS":
        losses.append(optimizer.step(compute).item())
        continue
    compute()
    if step == 3:  # clipped gradients
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        with optimizer.skip_synchronize():
            optimizer.step()
    else:
        optimizer.step()
parameters = torch.cat([parameter.detach().view(-1) for parameter in model.parameters()])
everyone = hvd.allgather(torch.cat([parameters, torch.tensor(losses)]).view(1, -1))
if hvd.rank() == 0:
    result = {"parameters": parameters.tolist(), "losses": losses}
    print(json.dumps({**result, "equal": bool((everyone == everyone[0]).all())}))
hvd.shutdown()
