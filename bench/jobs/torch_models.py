"""The modules of ``bench/torch_models.py``, as a job; ``bench/peers/torch_models.py`` trains the same modules."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from mpitrain import Hook, Job, data, optim
from mpitrain.plan.hook import TrainingLoop

BATCH = {"mlp100": 100, "mlp1024": 100, "mlp100m": 32, "cnn": 64, "gpt": 16}
CONTEXT, TOKENS, WIDTH, HEADS, BLOCKS = 64, 65, 128, 4, 4
EXAMPLES = 6000


class Gpt(nn.Module):
    """A small GPT: 0.8 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(TOKENS, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, BLOCKS, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.head.weight = self.tokens.weight
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT), persistent=False)
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight
        return self.head(self.blocks(x, mask=self.mask, is_causal=True))


def module_of(name: str) -> nn.Module:
    """Return a module by name."""
    if name == "gpt":
        return Gpt()
    if name == "cnn":  # 100,000 parameters
        return nn.Sequential(
            *(nn.Unflatten(1, (1, 28, 28)), nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
            *(nn.Linear(32 * 7 * 7, 60), nn.ReLU(), nn.Linear(60, 10)),
        )
    if name == "mlp100m":  # 104 million parameters
        hidden = [layer for _ in range(6) for layer in (nn.Linear(4096, 4096), nn.ReLU())]
        return nn.Sequential(nn.Linear(784, 4096), nn.ReLU(), *hidden, nn.Linear(4096, 10))
    width = int(name.removeprefix("mlp"))
    return nn.Sequential(nn.Linear(784, width), nn.ReLU(), nn.Linear(width, 10))


def arrays_of(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return examples and labels."""
    rng = np.random.default_rng(0)
    if name == "gpt":
        tokens = rng.integers(0, TOKENS, (EXAMPLES, CONTEXT + 1))
        return tokens[:, :-1].copy(), tokens[:, 1:].copy()
    return rng.random((EXAMPLES, 784), np.float32), rng.integers(0, 10, EXAMPLES)


def loss_of(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy, mean over all labels."""
    return functional.cross_entropy(outputs.flatten(0, -2), labels.flatten())


OPTIMIZERS = {"RMSprop": {}, "AdamW": {"fused": True}, "Adadelta": {}, "Adafactor": {}}  # of torch, with their options


def pss_bytes() -> int:
    """Return the memory of this process in bytes. Memory that n processes share counts as 1/n."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


class RecordMemory(Hook):
    """Writes the memory of each rank to a file in the folder of the variable ``PSS_FOLDER``, if it is set."""

    def end(self, loop: TrainingLoop) -> None:
        if folder := os.environ.get("PSS_FOLDER"):
            loop.cluster.comm.Barrier()
            Path(folder, str(loop.cluster.rank)).write_text(str(pss_bytes()))
            loop.cluster.comm.Barrier()


def job(model: str = "mlp100", optimizer: str = "") -> Job:
    """Train a module on random examples.

    Args:
        model: mlp100, mlp1024, mlp100m, cnn or gpt.
        optimizer: One of OPTIMIZERS; empty for Adam of mpitrain.
    """
    kind = getattr(torch.optim, optimizer) if optimizer else None
    return Job(
        model=module_of(model),
        loss=loss_of,
        optimizer=optim.adam(1e-3) if kind is None else lambda params: kind(params, 1e-3, **OPTIMIZERS[optimizer]),
        train=data.from_arrays(*arrays_of(model)),
        batch_size=BATCH[model],
        hooks=[RecordMemory()],
    )
