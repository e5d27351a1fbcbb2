"""A script with examples of random values and different lengths, which processes load; flags request faults."""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

sys.path.insert(0, str(Path(__file__).parents[2]))  # imports this checkout

import mpitrain
from tests.torch.sources import source

EXAMPLES, FAULTY = 40, 17


class Sentences(Dataset):  # type: ignore[type-arg]
    """Sequences of different lengths with noise from every random number generator."""

    def __init__(self, fault: str) -> None:
        self._fault, self._rank_process = fault, os.getpid()

    def __len__(self) -> int:
        return EXAMPLES

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, int]:
        if self._fault == "raise" and index == FAULTY:
            raise OSError("cannot identify image file 'broken.png'")
        if self._fault == "kill" and index == FAULTY and os.getpid() != self._rank_process:
            os.kill(os.getpid(), signal.SIGKILL)
        generator = torch.Generator().manual_seed(index)
        values = torch.randn(1 + index % 4, 6, generator=generator)
        return index, values + 0.1 * torch.rand(6) + 0.1 * random.random() + 0.1 * np.random.rand(), index % 3


def padded(examples: list[Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    indices, sequences, labels = zip(*examples, strict=True)
    return torch.tensor(indices), nn.utils.rnn.pad_sequence(list(sequences), batch_first=True), torch.tensor(labels)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--data-workers", type=lambda text: float(text) if "." in text else int(text), default=0)
    parser.add_argument("--kill-at", type=int)
    parser.add_argument("--fault", default="")
    parser.add_argument("--source", default="")
    parser.add_argument("--in-order", action="store_true")
    parser.add_argument("--epochs", type=int, default=3)
    arguments = parser.parse_args()
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(3 if arguments.source else 6, 8), nn.Dropout(0.1), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    trainer = mpitrain.Trainer(model, optimizer, threads=1, log_steps=0, save_steps=4)
    batch, workers = 12 // trainer.size, arguments.data_workers
    if arguments.source:
        loader = trainer.loader(source(arguments.source, arguments.out.parent), batch, num_workers=workers)
    else:
        sentences, in_order = Sentences(arguments.fault), arguments.in_order
        loader = trainer.loader(sentences, batch, shuffle=not in_order, num_workers=workers, collate_fn=padded)
    seen: dict[str, list[int]] = {}
    trainer.register("seen", seen, per_rank=True)
    killed = arguments.out / "killed"
    for epoch in trainer.epochs(arguments.epochs):
        for indices, sequences, labels in loader:
            if arguments.kill_at == trainer.step_count and trainer.rank == trainer.size - 1 and not killed.exists():
                while not (arguments.out / "run" / "checkpoints" / "step-0000000004.h5").exists():
                    time.sleep(0.01)  # it is written in the background
                killed.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            if arguments.fault == "wait":
                (arguments.out / f"waiting-{trainer.rank}").touch()
                time.sleep(0.2)
            mean = sequences if arguments.source else sequences.mean(1)
            noisy = mean + 0.01 * np.random.rand()  # the noise does not depend on the number of processes
            trainer.backward(nn.functional.cross_entropy(model(noisy), labels))
            optimizer.step()
            seen.setdefault(f"epoch {epoch}", []).extend(indices.tolist())
            with (arguments.out / "trained.jsonl").open("a") as file:
                file.write(json.dumps([trainer.step_count, trainer.size, indices.tolist()]) + "\n")
    values = {f"param {i}": parameter.detach().numpy() for i, parameter in enumerate(model.parameters())}
    np.savez(
        arguments.out / f"{trainer.rank}.npz",
        seen=np.array([index for indices in seen.values() for index in indices]),
        examples=len(loader.dataset),
        **values,
    )


if __name__ == "__main__":
    main()
