"""The matrix products of a training step alone, in RANKS processes at once; prints microseconds per step as JSON.

python bench/peers/products.py MODEL RANKS STEPS
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import time
from typing import Any

import numpy as np

from mpitrain.core.winograd import BLOCK_BYTES, MIN_BLOCK_TILES

BATCH = 100


def dense(rows: int, inputs: int, outputs: int, first: bool = False) -> list[tuple[Any, Any, Any]]:
    """Return operands and output of a layer's products: output, weight gradient, input gradient unless ``first``."""
    generator = np.random.default_rng(0)
    x, w, y = (
        generator.normal(size=shape).astype(np.float32)
        for shape in ((rows, inputs), (inputs, outputs), (rows, outputs))
    )
    products = [(x, w, np.empty_like(y)), (x.T, y, np.empty_like(w))]
    return products if first else [*products, (y, w.T, np.empty_like(x))]


def convolution(images: int, side: int, channels: int, filters: int, first: bool = False) -> list[tuple[Any, Any, Any]]:
    """Return the products of a 3 x 3 convolution with biases, for each block of images whose windows stay in cache."""
    block = max(1, 784 // side**2)
    return dense(block * side**2, 9 * channels + 1, filters, first) * (images // block)


def winograd(images: int, side: int, channels: int, filters: int) -> list[tuple[Any, Any, Any]]:
    """Return the products of a 3 x 3 convolution by Winograd's algorithm, for blocks like those of a training step."""
    tiles = (-(-side // 2)) ** 2
    block = max(1, max(MIN_BLOCK_TILES, BLOCK_BYTES // (64 * (channels + filters))) // tiles)
    generator = np.random.default_rng(0)
    x, w, y = (
        generator.normal(size=(16, *shape)).astype(np.float32)
        for shape in ((block * tiles, channels), (channels, filters), (block * tiles, filters))
    )
    turned = np.ascontiguousarray(w.transpose(0, 2, 1))
    return [(x, w, y), (x.transpose(0, 2, 1), y, np.empty_like(w)), (y, turned, np.empty_like(x))] * (images // block)


MODELS = {
    "mlp100": lambda: dense(BATCH, 784, 100, first=True) + dense(BATCH, 100, 10),
    "mlp1024": lambda: dense(BATCH, 784, 1024, first=True) + dense(BATCH, 1024, 10),
    "cnn": lambda: convolution(BATCH, 28, 1, 32, first=True) + convolution(BATCH, 14, 32, 64) + dense(BATCH, 3136, 10),
    "cnn-winograd": lambda: (
        convolution(BATCH, 28, 1, 32, first=True) + winograd(BATCH, 14, 32, 64) + dense(BATCH, 3136, 10)
    ),
}


def measure(name: str, steps: int, barrier: Any, results: Any) -> None:
    """Put the microseconds of all products into ``results``: the median over ten intervals."""
    model, with_torch = name.removesuffix("-torch"), name.endswith("-torch")
    products, multiply = MODELS[model](), np.matmul
    if with_torch:
        import torch

        torch.set_num_threads(1)
        products, multiply = [tuple(map(torch.from_numpy, product)) for product in products], torch.mm
    barrier.wait()
    times = []
    for _ in range(10):
        began = time.perf_counter()
        for _ in range(max(1, steps // 10)):
            for a, b, out in products:
                multiply(a, b, out=out)
        times.append((time.perf_counter() - began) / max(1, steps // 10))
    results.put(1e6 * sorted(times)[len(times) // 2])


def main() -> None:
    """Start the processes, and print the mean of their medians."""
    name, ranks, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(ranks), context.Queue()
    processes = [context.Process(target=measure, args=(name, steps, barrier, results)) for _ in range(ranks)]
    for process in processes:
        process.start()
    print(json.dumps(sum(results.get() for _ in processes) / ranks))
    for process in processes:
        process.join()


if __name__ == "__main__":
    main()
