"""Random numbers that depend on the run's seed and the position in the stream of examples alone."""

from __future__ import annotations

import random
import sys
from typing import Any

import numpy as np

# Purposes of random numbers: loading an example, the model, the rest of a batch's step.
EXAMPLES_STREAM, MODEL_STREAM, LOOP_STREAM = 0, 1, 2


def seed_torch(seed: int, position: int, device: Any) -> None:
    """Seed the random generator of a torch device for the batch at this position of the stream of examples."""
    # ``torch.manual_seed`` would take 0.5 ms: it stores a stack trace in case CUDA is initialized later.
    torch = sys.modules["torch"]
    generator = torch.cuda.default_generators[device.index] if device.type == "cuda" else torch.default_generator
    generator.manual_seed(_mixed(seed, position, MODEL_STREAM))


def seed_all(seed: int, position: int, stream: int = EXAMPLES_STREAM) -> None:
    """Seed the random generators of Python, NumPy and, if it has been imported, torch. Takes some 10 us.

    Args:
        position: The position of the example to load, or of the first example of the batch whose step begins.
    """
    mixed = _mixed(seed, position, stream)
    random.seed(mixed)
    np.random.seed(mixed & 0xFFFFFFFF)
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.manual_seed(mixed)


def generator_at(seed: int, position: int) -> np.random.Generator:
    """Return the generator for the transforms of the example at this position of the stream."""
    return np.random.Generator(np.random.PCG64(_mixed(seed, position, EXAMPLES_STREAM)))


def _mixed(seed: int, position: int, stream: int) -> int:
    """Return a number in [0, 2**63) for a stream of random numbers, by the finalizer of SplitMix64."""
    mixed = (seed * 3 + stream) * 0x9E3779B97F4A7C15 + position
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed &= 0xFFFFFFFFFFFFFFFF
        mixed = (mixed ^ (mixed >> shift)) * factor
    mixed &= 0xFFFFFFFFFFFFFFFF
    return (mixed ^ (mixed >> 31)) >> 1
