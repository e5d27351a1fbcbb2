"""A script that shards a model with FSDP2 on CPUs, saves a checkpoint every 20 steps, and resumes from it.

torchrun --nproc-per-node 2 fsdp2.py STEPS
mpitrain run -n 2 fsdp2.py STEPS
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

CHECKPOINT = Path("checkpoint.pt")
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def main() -> None:
    dist.init_process_group(os.environ["BACKEND"])
    rank, steps = dist.get_rank(), int(sys.argv[1])
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    first = 0
    if CHECKPOINT.exists():
        saved = torch.load(CHECKPOINT)
        options = StateDictOptions(full_state_dict=True)
        set_state_dict(
            model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"], options=options
        )
        first = saved["step"]
        print(f"resumed after step {first}")
    for step in range(first + 1, steps + 1):
        source = torch.Generator().manual_seed(2 * step + rank)
        inputs = torch.randn(16, 8, generator=source)
        loss = torch.nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            state, optimizer_state = get_state_dict(model, optimizer, options=WHOLE)
            if rank == 0:
                torch.save({"model": state, "optimizer": optimizer_state, "step": step}, "partial.pt")
                Path("partial.pt").replace(CHECKPOINT)
                print(f"step {step}: loss {loss.item():.6f}", flush=True)
    state, _ = get_state_dict(model, optimizer, options=WHOLE)
    if rank == 0:
        torch.save(state, "result.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
