"""The peer of ``bench/batch_norm.py``: BatchNorm1d of PyTorch, forward and backward.

    python bench/peers/batch_norm.py BATCHES RESULTS

Reads and writes ``.npz`` files: see ``bench/batch_norm.py``.
"""

from __future__ import annotations

import sys

import numpy as np
import torch

batches = np.load(sys.argv[1])
results = {}
for name in ("float32", "float64"):
    steps = []
    for examples, gradients in zip(batches[f"{name}_x"], batches[f"{name}_dy"], strict=True):
        x = torch.from_numpy(examples).requires_grad_()
        y = torch.nn.BatchNorm1d(x.shape[1], dtype=x.dtype)(x)
        y.backward(torch.from_numpy(gradients))
        steps.append((y.detach().numpy(), x.grad.numpy()))
    results[f"{name}_y"], results[f"{name}_dx"] = map(np.array, zip(*steps, strict=True))
np.savez(sys.argv[2], **results)
