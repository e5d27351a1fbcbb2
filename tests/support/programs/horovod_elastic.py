"""Elastic training with Horovod's API: rank 1 dies once. Rank 0 writes the examples used and a parameter as JSON.

python horovod_elastic.py OUTPUT STEPS KILL_AT
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn

import mpitrain.horovod.torch as hvd

output, steps, kill_at = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
hvd.init()
torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Linear(4, 2).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
sampler = hvd.elastic.ElasticSampler(range(48), seed=3)
data = torch.randn(48, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@hvd.elastic.run
def train(state: hvd.elastic.TorchState) -> None:
    first = state.step
    while state.step < steps:
        batch = [*sampler][: 8 // hvd.size()]
        optimizer.zero_grad()
        model(data[batch]).square().mean().backward()
        optimizer.step()
        sampler.record_batch(state.step, len(batch))
        sampler.repartition()
        state.seen.append(hvd.allgather(torch.tensor(batch)).sort().values.tolist())
        state.step += 1
        state.commit()
        if state.step == kill_at and hvd.rank() == 1 and os.environ.get("MPITRAIN_RESTART_COUNT", "0") == "0":
            os.kill(os.getpid(), signal.SIGKILL)
    if hvd.rank() == 0:
        result = {"first": first, "seen": state.seen, "resets": resets, "size": hvd.size()}
        output.write_text(json.dumps({**result, "weight": model.weight.tolist()}))


resets: list[int] = []
state = hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, step=0, seen=[])
state.register_reset_callbacks([lambda: resets.append(hvd.size())])
train(state)
