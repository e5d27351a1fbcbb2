"""The peer of ``bench/gpu.py``: the same training with PyTorch on one GPU.

    python bench/peers/torch_gpu.py MODEL BATCH STEPS PRECISION MODE [--data gpu|host] [--device cuda|cpu]

MODEL is ``mlp``, ``cnn`` or ``wide``, or a module of ``bench/jobs/torch_models.py``, such as ``jobs.gpt``. MODE is:

    eager            the module as it is
    compile          torch.compile of the module with its loss
    reduce-overhead  the same with mode="reduce-overhead": CUDA graphs of the forward and the backward pass
    graph            one CUDA graph of the whole step, including the gathering of the batch

Every mode uses the fused Adam and ``cudnn.benchmark``. The examples are in GPU memory, or with ``--data host`` in host
memory, from where a step copies them in their stored type. Prints JSON: ``steps_per_s`` of each interval of steps
except the first, and ``memory``, the bytes of GPU memory that torch has reserved. ``--device cpu`` checks the program
on a machine without a GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

INTERVALS = 10
WARM_UP_STEPS = 10
BUFFERS = 3  # the host fills one while another is copied to the GPU
MODES = ("eager", "compile", "reduce-overhead", "graph")
AMP_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("batch", type=int)
    parser.add_argument("steps", type=int)
    parser.add_argument("precision", choices=["float32", "tf32", *AMP_DTYPES])
    parser.add_argument("mode", choices=MODES)
    parser.add_argument("--data", choices=["gpu", "host"], default="gpu")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        sys.exit(f"no NVIDIA GPU: torch {torch.__version__} finds none")
    if arguments.device == "cpu" and (arguments.mode == "graph" or arguments.data == "host"):
        sys.exit("--device cpu: mode graph and --data host require CUDA; use another mode, and --data gpu")
    rates = measure(make_step(arguments), arguments.steps, arguments.device == "cuda")
    memory = torch.cuda.max_memory_reserved() if arguments.device == "cuda" else 0
    print(json.dumps({"steps_per_s": rates, "memory": memory}), flush=True)


def measure(step: Callable[[int], None], steps: int, is_cuda: bool) -> list[float]:
    """Return the steps/s of each interval except the first."""
    wait = torch.cuda.synchronize if is_cuda else lambda: None
    for number in range(WARM_UP_STEPS):
        step(number)
    rates, every = [], max(1, steps // INTERVALS)
    for interval in range(INTERVALS):
        wait()
        began = time.perf_counter()
        for number in range(interval * every, (interval + 1) * every):
            step(number)
        wait()
        rates.append(every / (time.perf_counter() - began))
    return rates[1:]


def make_step(arguments: Any) -> Callable[[int], None]:
    """Return a function that trains on a batch, given its number."""
    torch.manual_seed(0)
    # The next two lines set TF32 in torch's older and newer interfaces. fp32_precision sets only the newer interface;
    # in torch 2.11 and 2.13, Inductor then gets an error when it reads the older interface.
    torch.set_float32_matmul_precision("high" if arguments.precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = arguments.precision == "tf32"
    torch.backends.cudnn.benchmark = True
    device, mode, dtype = torch.device(arguments.device), arguments.mode, AMP_DTYPES.get(arguments.precision)
    model, loss_of, examples, labels = MAKERS.get(arguments.model, from_job)(arguments.model, 2 * arguments.batch)
    model = model.to(device)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3, fused=True, capturable=mode == "graph")
    batches = (OnGpu if arguments.data == "gpu" else OnHost)(examples, labels, arguments.batch, device)

    def forward(x: Tensor, y: Tensor) -> Tensor:
        # With the cache, a weight that was cast before the capture would not be cast again in the graph.
        with nullcontext() if dtype is None else torch.autocast(device.type, dtype, cache_enabled=mode != "graph"):
            return loss_of(model(x), y)

    if mode in ("compile", "reduce-overhead"):
        forward = torch.compile(forward, mode="default" if mode == "compile" else mode)

    def train(*inputs: Tensor) -> None:
        optimizer.zero_grad()
        forward(*batches.batch_of(*inputs)).backward()
        optimizer.step()

    if mode == "graph":
        return captured(train, batches)
    return lambda number: train(*batches.fetch(number))


def captured(train: Callable[..., None], batches: OnGpu | OnHost) -> Callable[[int], None]:
    """Return a step that is one CUDA graph; follows "Whole-network capture" in PyTorch's notes on CUDA semantics."""
    inputs = [each.clone() if isinstance(batches, OnGpu) else each for each in batches.fetch(0)]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            train(*inputs)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        train(*inputs)

    def step(number: int) -> None:
        for target, value in zip(inputs, batches.fetch(number), strict=True):
            if target is not value:
                target.copy_(value)
        graph.replay()

    return step


class OnGpu:
    """Examples in the device's memory: a batch is a slice of a random order, gathered on the device."""

    def __init__(self, examples: Tensor, labels: Tensor, batch: int, device: torch.device) -> None:
        self._examples, self._labels = scaled(examples.to(device)), labels.to(device)
        self._order, self._batch = torch.randperm(len(examples), device=device), batch

    def fetch(self, number: int) -> tuple[Tensor, ...]:
        """Return what ``batch_of`` needs for a batch, on the device."""
        return (chosen_of(self._order, number, self._batch),)

    def batch_of(self, chosen: Tensor) -> tuple[Tensor, Tensor]:
        return self._examples[chosen], self._labels[chosen]


class OnHost:
    """Examples in host memory: a batch is gathered in page-locked memory and copied in its stored type."""

    def __init__(self, examples: Tensor, labels: Tensor, batch: int, device: torch.device) -> None:
        self._stored, self._batch = (examples, labels), batch
        self._order = torch.randperm(len(examples))
        self._on_device = tuple(each[:batch].to(device) for each in self._stored)
        self._buffers = [
            (tuple(each[:batch].clone().pin_memory() for each in self._stored), torch.cuda.Event())
            for _ in range(BUFFERS)
        ]

    def fetch(self, number: int) -> tuple[Tensor, ...]:
        """Return what ``batch_of`` needs for a batch, on the device: the same memory for every batch."""
        chosen = chosen_of(self._order, number, self._batch)
        buffers, copied = self._buffers[number % BUFFERS]
        copied.synchronize()
        for stored, buffer, target in zip(self._stored, buffers, self._on_device, strict=True):
            torch.index_select(stored, 0, chosen, out=buffer)
            target.copy_(buffer, non_blocking=True)
        copied.record()
        return self._on_device

    def batch_of(self, examples: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return scaled(examples), labels


def chosen_of(order: Tensor, number: int, batch: int) -> Tensor:
    """Return the indices of a batch's examples."""
    start = number * batch % (len(order) - batch)
    return order[start : start + batch]


def scaled(examples: Tensor) -> Tensor:
    """Return bytes of images as float32 in [0, 1], and other examples unchanged."""
    return examples.float() / 255 if examples.dtype == torch.uint8 else examples


# Models. Each maker returns a module, its loss, examples and labels.

Made = tuple[nn.Module, Callable[[Tensor, Tensor], Tensor], Tensor, Tensor]


def mlp(name: str, least: int) -> Made:
    model = nn.Sequential(nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 10))
    return model, nn.CrossEntropyLoss(), *noise(max(least, 60_000), 784, 10)


def wide(name: str, least: int) -> Made:
    model = nn.Sequential(nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 4096))
    return model, nn.CrossEntropyLoss(), *noise(max(least, 16_384), 4096, 4096)


def cnn(name: str, least: int) -> Made:
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
    images = noise(max(least, 60_000), 784, 10)
    return model.to(memory_format=torch.channels_last), nn.CrossEntropyLoss(), *images


def from_job(name: str, least: int) -> Made:
    """Return a module of ``bench/jobs/torch_models.py``, which imports mpitrain."""
    sys.path[:0] = [str(Path(__file__).parents[1] / "jobs"), str(Path(__file__).parents[2])]
    import torch_models as models

    name = name.removeprefix("jobs.")
    return models.module_of(name), models.loss_of, *map(torch.from_numpy, models.arrays_of(name))


def noise(count: int, features: int, classes: int) -> tuple[Tensor, Tensor]:
    """Return random images, as bytes, and labels."""
    return torch.randint(0, 256, (count, features), dtype=torch.uint8), torch.randint(0, classes, (count,))


MAKERS = {"mlp": mlp, "wide": wide, "cnn": cnn}


if __name__ == "__main__":
    main()
