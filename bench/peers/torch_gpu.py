"""The peer of ``bench/gpu.py``: the same job with PyTorch on one GPU.

    python bench/peers/torch_gpu.py MODEL BATCH STEPS PRECISION {eager,compile,reduce-overhead}

Prints a JSON list: steps/s for each interval of steps except the first. The data is on the GPU, so nothing is copied to
it. Eager runs use PyTorch's default Adam; compiled runs compile the model with its loss, and use the fused Adam.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import nullcontext

import torch
from torch import nn

INTERVALS = 10


def model_of(name: str) -> tuple[nn.Module, int, int]:
    """Return the model, the number of features of an example, and the number of classes."""
    if name == "mlp":
        return nn.Sequential(nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 10)), 784, 10
    if name == "wide":
        return nn.Sequential(nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 4096)), 4096, 4096
    model = nn.Sequential(
        nn.Unflatten(1, (1, 28, 28)),
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(7 * 7 * 64, 10),
    )
    return model.to(memory_format=torch.channels_last), 784, 10


def main(name: str, batch: int, steps: int, precision: str, mode: str) -> None:
    torch.manual_seed(0)
    for part in (torch.backends.cuda.matmul, torch.backends.cudnn):
        part.allow_tf32 = precision == "tf32"
    model, features, classes = model_of(name)
    model = model.cuda()
    count = max(2 * batch, 60_000 if features == 784 else 16384)
    examples = torch.randint(0, 256, (count, features), device="cuda").float() / 255
    labels = torch.randint(0, classes, (count,), device="cuda")
    optimizer = torch.optim.Adam(model.parameters(), 1e-3, fused=True if mode != "eager" else None)
    loss_of = nn.CrossEntropyLoss()
    amp_dtype = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(precision)
    autocast = (lambda: torch.autocast("cuda", amp_dtype)) if amp_dtype is not None else nullcontext

    def forward(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with autocast():
            return loss_of(model(x), y)

    if mode == "compile":
        forward = torch.compile(forward)
    elif mode == "reduce-overhead":
        forward = torch.compile(forward, mode="reduce-overhead")
    order = torch.randperm(count, device="cuda")

    def step(number: int) -> None:
        start = number * batch % (count - batch)
        chosen = order[start : start + batch]
        optimizer.zero_grad()
        forward(examples[chosen], labels[chosen]).backward()
        optimizer.step()

    for number in range(10):
        step(number)
    rates = []
    every = max(1, steps // INTERVALS)
    for _ in range(INTERVALS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for number in range(every):
            step(number)
        torch.cuda.synchronize()
        rates.append(every / (time.perf_counter() - began))
    print(json.dumps(rates[1:]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5])
