"""A torchrun script: sums over the ranks, and writes the result and its environment to a folder.

Its arguments: the folder, and optionally ``mpitrain`` (to use this backend in place of gloo) and ``wait``.
"""

import json
import os
import socket
import sys
from pathlib import Path

import torch
import torch.distributed as dist

NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR")

torch.set_num_threads(1)
dist.init_process_group("mpitrain" if "mpitrain" in sys.argv[2:] else "gloo")
total = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(total)
record = {name: os.environ[name] for name in NAMES}
record |= {"host": socket.gethostname(), "sum": total.item(), "interface": os.environ.get("GLOO_SOCKET_IFNAME")}
folder = Path(sys.argv[1])
(folder / f"sum-{dist.get_rank()}.json").write_text(json.dumps(record))
if "wait" in sys.argv[2:]:  # until a rank is lost
    while True:
        dist.all_reduce(total)
dist.destroy_process_group()
