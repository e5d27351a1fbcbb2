"""The peers of ``bench/checkpoint.py``: the same arrays saved and loaded with torch.save and safetensors.

    python bench/peers/saving.py {torch,safetensors} {save,load} FILE LAYERS SIDE

Prints the duration in seconds; saving includes fsync, as for a checkpoint.
"""

from __future__ import annotations

import os
import sys
import time

import torch
from safetensors.torch import load_file, save_file


def state(layers: int, side: int) -> dict[str, torch.Tensor]:
    made = {}
    for group in ("params", "mean", "square"):
        for layer in range(layers):
            made[f"{group}.dense{layer}.weight"] = torch.randn(side, side)
            made[f"{group}.dense{layer}.bias"] = torch.randn(side)
    return made


def main() -> None:
    library, what, path, layers, side = sys.argv[1:]
    tensors = state(int(layers), int(side))
    began = time.perf_counter()
    if what == "save":
        torch.save(tensors, path) if library == "torch" else save_file(tensors, path)
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    else:
        loaded = torch.load(path, weights_only=True) if library == "torch" else load_file(path)
        for name, tensor in tensors.items():  # into the model's memory, as when resuming a run
            tensor.copy_(loaded[name])
    print(time.perf_counter() - began)


if __name__ == "__main__":
    main()
