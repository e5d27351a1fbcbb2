"""Process sets that are passed to ``init``: by ranks and by communicator. Then ``init`` on some of the ranks only.

Rank 0 prints the results of the ranks as JSON.
"""

from __future__ import annotations

import json

import torch
from mpi4py import MPI

import mpitrain.horovod.torch as hvd

world = MPI.COMM_WORLD
ranks_of_parity = world.Split(world.rank % 2, key=world.rank)
by_parity = hvd.ProcessSet(ranks_of_parity)
first_two = hvd.ProcessSet([1, 0])
hvd.init(world, process_sets=[by_parity, first_two])
ones = torch.ones(3)
found = {
    "parity": hvd.allreduce(ones, op=hvd.Sum, process_set=by_parity)[0].item(),
    "ranks": by_parity.ranks,
    "rank": [by_parity.rank(), by_parity.size(), first_two.included()],
    "first two": first_two.included() and hvd.allreduce(ones, op=hvd.Sum, process_set=first_two)[0].item(),
}
hvd.shutdown()
if world.rank:
    hvd.init(comm=[1, 2])
    found["some"] = [hvd.rank(), hvd.size(), hvd.allreduce(ones, op=hvd.Sum)[0].item()]
    hvd.shutdown()
everyone = world.gather(found)
if world.rank == 0:
    print(json.dumps({"found": everyone}))
ranks_of_parity.Free()
