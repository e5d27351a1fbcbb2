"""Training with PyTorch's parallel wrappers over this backend, compared with the same training over gloo.

    python backend_training.py [--device cpu]

Both are process groups of the same ranks. Rank 0 prints one line of JSON: for each way of training, the largest
difference of a parameter.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--device", default="cpu")
DEVICE: str = parser.parse_args().device
warnings.simplefilter("ignore")
torch.set_num_threads(1)
torch.set_default_device(DEVICE)
torch.set_default_dtype(torch.float64)  # so that the order of additions makes no difference that Adam amplifies
dist.init_process_group("mpitrain", init_method="mpitrain://")
RANK, SIZE = dist.get_rank(), dist.get_world_size()
GLOO = dist.new_group(backend="gloo")
STEPS = 5
found: dict[str, float] = {}


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(20, 30), nn.BatchNorm1d(30), nn.ReLU(), nn.Linear(30, 30), nn.ReLU(), nn.Linear(30, 4)
    )


def train(model: nn.Module, rule: torch.optim.Optimizer) -> None:
    generator = torch.Generator(DEVICE).manual_seed(RANK)
    for _ in range(STEPS):
        examples = torch.randn(8, 20, generator=generator)
        rule.zero_grad()
        model(examples).square().mean().backward()
        rule.step()


def difference(a: nn.Module | dict[str, torch.Tensor], b: nn.Module | dict[str, torch.Tensor]) -> float:
    a, b = (x if isinstance(x, dict) else x.state_dict() for x in (a, b))
    assert a.keys() == b.keys() and a
    return max(float((a[name].double() - b[name].double()).abs().max()) for name in a)


def ddp(group: dist.ProcessGroup | None, hook: object = None, zero: bool = False, buckets_mb: float = 25) -> nn.Module:
    model = nn.parallel.DistributedDataParallel(make(), process_group=group, bucket_cap_mb=buckets_mb)
    if hook is powerSGD_hook.powerSGD_hook:
        model.register_comm_hook(powerSGD_hook.PowerSGDState(group, 1, start_powerSGD_iter=2), hook)
    elif hook is not None:
        model.register_comm_hook(group, hook)
    if zero:
        rule = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, process_group=group, lr=0.01)
    else:
        rule = torch.optim.Adam(model.parameters(), 0.01)
    train(model, rule)
    return model.module


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in model.state_dict().items()
    }


def fsdp2(group: dist.ProcessGroup) -> dict[str, torch.Tensor]:
    mesh = DeviceMesh.from_group(group, DEVICE)
    model = make()
    for layer in (model[0], model[3]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    train(model, torch.optim.Adam(model.parameters(), 0.01))
    return whole(model)


def fsdp1(group: dist.ProcessGroup) -> dict[str, torch.Tensor]:
    model = FullyShardedDataParallel(make(), process_group=group, device_id=torch.device(DEVICE))
    train(model, torch.optim.Adam(model.parameters(), 0.01))
    with FullyShardedDataParallel.summon_full_params(model):
        return {name: value.detach().clone() for name, value in model.named_parameters()}


def dtensor() -> None:
    mesh = init_device_mesh(DEVICE, (SIZE,))
    a, b = torch.arange(24.0).view(6, 4), torch.arange(20.0).view(4, 5)
    product = distribute_tensor(a, mesh, [Shard(1)]) @ distribute_tensor(b, mesh, [Shard(0)])
    found["DTensor"] = float((product.full_tensor() - a @ b).abs().max())
    moved = (
        distribute_tensor(a, mesh, [Shard(0)])
        .redistribute(placements=[Shard(1)])
        .redistribute(placements=[Replicate()])
    )
    found["DTensor moved"] = float((moved.to_local() - a).abs().max())


def saved() -> None:
    mesh = init_device_mesh(DEVICE, (SIZE,))
    folder = [tempfile.mkdtemp() if RANK == 0 else None]
    dist.broadcast_object_list(folder)
    state = {"weight": distribute_tensor(torch.arange(30.0).view(6, 5), mesh, [Shard(0)]), "step": torch.tensor(7)}
    checkpoint.save(state, checkpoint_id=folder[0])
    loaded = {"weight": distribute_tensor(torch.zeros(6, 5), mesh, [Shard(0)]), "step": torch.tensor(0)}
    checkpoint.load(loaded, checkpoint_id=folder[0])
    found["checkpoint"] = float((loaded["weight"].full_tensor() - torch.arange(30.0).view(6, 5)).abs().max())
    assert int(loaded["step"]) == 7


def saved_while_training() -> None:
    """Save an FSDP2 model in the background, over a second group; restore it from the file, and from rank 0."""
    mesh = init_device_mesh(DEVICE, (SIZE,))
    folder = [tempfile.mkdtemp() if RANK == 0 else None]
    dist.broadcast_object_list(folder)
    model = make()
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    fully_shard(model, mesh=mesh)
    saving = checkpoint.async_save(model.state_dict(), checkpoint_id=folder[0], process_group=dist.new_group())
    train(model, torch.optim.SGD(model.parameters(), 0.1))
    saving.result()
    state = model.state_dict()
    checkpoint.load(state, checkpoint_id=folder[0])
    model.load_state_dict(state)
    found["asynchronous checkpoint"] = difference(whole(model), expected)
    train(model, torch.optim.SGD(model.parameters(), 0.1))
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, dict(expected) if RANK == 0 else {}, options=options)  # changes the dict
    found["state of rank 0"] = difference(whole(model), expected)


def loader() -> None:
    dataset = TensorDataset(torch.arange(12.0, device="cpu"))
    total = torch.zeros(1)
    for (batch,) in DataLoader(dataset, batch_size=4, num_workers=2):
        total += batch.sum()
        dist.all_reduce(total)
        total /= SIZE
    found["DataLoader"] = float((total - 66).abs())


found["DDP"] = difference(ddp(None), ddp(GLOO))
found["DDP, many buckets"] = difference(ddp(None, buckets_mb=0.001), ddp(GLOO, buckets_mb=0.001))
hooks = {"allreduce": default_hooks.allreduce_hook, "fp16": default_hooks.fp16_compress_hook}
for name, hook in {**hooks, "PowerSGD": powerSGD_hook.powerSGD_hook}.items():
    found[f"DDP, {name}"] = difference(ddp(dist.group.WORLD, hook), ddp(GLOO, hook))
found["ZeRO"] = difference(ddp(dist.group.WORLD, zero=True), ddp(GLOO, zero=True))
found["FSDP2"] = difference(fsdp2(dist.group.WORLD), fsdp2(GLOO))
try:
    found["FSDP1"] = difference(fsdp1(dist.group.WORLD), fsdp1(GLOO))
except Exception as error:
    print(f"FSDP1: {error}", file=sys.stderr)
for parameter in ddp(None).parameters():
    value = parameter.detach()
    other = value.clone()
    dist.broadcast(other, 0)
    assert torch.equal(other, value), "ranks differ"
dtensor()
saved()
saved_while_training()
loader()
dist.barrier()
if RANK == 0:
    print(json.dumps(found), flush=True)
dist.destroy_process_group()
