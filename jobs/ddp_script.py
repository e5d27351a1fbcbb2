"""A script that uses PyTorch's DistributedDataParallel, but not mpitrain.

    mpitrain run -n 2 jobs/ddp_script.py --epochs 3
    torchrun --nproc-per-node 2 jobs/ddp_script.py --epochs 3

The script saves a checkpoint after every epoch, and continues from the checkpoint when it is started again. After
SIGTERM, it exits with status 75 at the end of the epoch, so that mpitrain submit requeues the job.
"""

import argparse
import os
import signal
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--checkpoint", default="ddp_script.pt")
arguments = parser.parse_args()

stop_requested = torch.zeros(1)
signal.signal(signal.SIGTERM, lambda number, frame: stop_requested.fill_(1))

on_gpu = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
dist.init_process_group("nccl" if on_gpu else "gloo")

torch.manual_seed(0)
inputs = torch.randn(4096, 20)
dataset = TensorDataset(inputs, (inputs @ torch.randn(20, 4)).argmax(1))
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=32, sampler=sampler)
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 4)).to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
loss_of = nn.CrossEntropyLoss()

first_epoch = 0
if os.path.exists(arguments.checkpoint):
    saved = torch.load(arguments.checkpoint, map_location=device)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    first_epoch = saved["epoch"]
ddp_model = DistributedDataParallel(model, device_ids=[device.index] if on_gpu else None)

for epoch in range(first_epoch, arguments.epochs):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        loss = loss_of(ddp_model(x.to(device)), y.to(device))
        loss.backward()
        optimizer.step()
    if dist.get_rank() == 0:
        print(f"epoch {epoch}: loss {loss.item():.4f}", flush=True)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch + 1}
        torch.save(state, f"{arguments.checkpoint}.partial")
        os.replace(f"{arguments.checkpoint}.partial", arguments.checkpoint)
    stops = stop_requested.to(device)
    dist.all_reduce(stops)  # the signal may reach the ranks in different epochs
    if stops.item() and epoch + 1 < arguments.epochs:
        dist.destroy_process_group()
        sys.exit(75)
dist.destroy_process_group()
