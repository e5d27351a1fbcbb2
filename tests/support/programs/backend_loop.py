"""Repeats ``all_reduce`` over the backend; after 100 operations, rank 1 stops, dies or hangs, as the argument says."""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist

dist.init_process_group("mpitrain")
action = sys.argv[1]
for step in range(200):
    dist.all_reduce(torch.ones(1000))
    if dist.get_rank() == 1 and step == 100 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        if action == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif action == "hang":
            time.sleep(100)
    time.sleep(0.005)
dist.destroy_process_group()
