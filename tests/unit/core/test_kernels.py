"""The loops of compiled kernels over elements use the vector instructions of the machine that runs the test."""

from __future__ import annotations

import importlib
import pkgutil
import platform
import re
from typing import Any

import numba
import numpy as np
import pytest
from numba.core.registry import CPUDispatcher

from mpitrain.optim.compiled import RULES

pytestmark = pytest.mark.full

PACKAGES = ("core", "comm", "data", "optim", "strategy", "backend")  # those with kernels
ROW, GRID, IMAGES = np.ones(64, np.float32), np.ones((16, 64), np.float32), np.ones((2, 8, 8, 16), np.float32)
PAIR, WIDE = np.ones((2, 64), np.float32), np.ones((2, 64))
BITS, BYTES, PLACES = np.ones(64, np.uint32), np.ones((16, 64), np.uint8), np.ones((2, 4, 4, 16), np.uint8)
POOLED = np.ones((2, 4, 4, 16), np.float32)
WINDOWS = np.ones((2, 4, 4, 144), np.float32)
TILES = np.ones((16, 2, 4, 4, 16), np.float32)
INDICES = np.arange(16)
SEED = np.uint64(1)
CONSTANTS = (0.1,) * 6

# Arguments of the kernels whose loops must be vectorized, by module and name.
VECTORIZED: dict[str, tuple[Any, ...]] = {
    "comm.compression_kernels.update_residual": (ROW, ROW, ROW),
    "comm.compression_kernels.upcast_bfloat16": (np.ones(64, np.uint16), BITS),
    "comm.compression_kernels.round_bfloat16": (BITS, np.ones(64, np.uint16)),
    "comm.compression_kernels._round_to_codes": (ROW, np.float32(1), np.ones(64, np.int8)),
    "comm.compression_kernels.encode_int8": (ROW, ROW, np.ones(1, np.float32), np.ones(64, np.int8)),
    "comm.compression_kernels.decode_int8": (np.ones(1, np.float32), np.ones(64, np.int8), ROW),
    "comm.compression_kernels.encode_int4": (ROW, ROW, np.ones(1, np.float32), np.ones(32, np.uint8)),
    "comm.compression_kernels.decode_int4": (np.ones(1, np.float32), np.ones(32, np.uint8), ROW),
    "comm.powersgd._orthogonalize": (GRID,),
    "comm.powersgd._swap": (ROW, ROW, 0.5),
    "comm.vector_codec._drop_non_finite": (ROW,),
    "core.kernels.sum_rows": (GRID, INDICES, 0, 64, 1.0, ROW),
    "core.kernels._add": (ROW, ROW),
    "core.kernels.sum_in_place": (GRID, INDICES, 0, 64, 1.0, 0),
    "core.ops.activations._add_bias": (GRID, ROW),
    "core.ops.activations._add_bias_relu": (GRID, ROW),
    "core.ops.activations._relu_backward_sum": (GRID, GRID, ROW),
    "core.ops.activations._sum_columns": (GRID, ROW),
    "core.ops.activations._relu": (ROW, ROW),
    "core.ops.activations._relu_in_place": (ROW,),
    "core.ops.activations._relu_backward": (ROW, ROW),
    "core.ops.activations._leaky_relu": (ROW, 0.1, ROW),
    "core.ops.activations._leaky_relu_backward": (ROW, 0.1, ROW),
    "core.ops.activations._tanh_backward": (ROW, ROW),
    "core.ops.activations._sigmoid": (ROW, ROW),
    "core.ops.activations._sigmoid_backward": (ROW, ROW),
    "core.ops.batches.take": (BYTES, INDICES, 1.0, GRID),
    "core.ops.dropout.drop": (GRID, GRID, SEED, SEED, 0, SEED, 1.0),
    "core.ops.batches.take_rows": (GRID, INDICES, GRID),
    "core.ops.batches.add_rows": (GRID, INDICES, GRID),
    "core.ops.losses.softmax_gradient": (GRID, INDICES, 1.0, GRID, None),
    "core.ops.losses.square_gradient": (GRID, GRID, 1.0, GRID, None),
    "core.ops.losses.square_evaluate": (GRID, GRID),
    "core.ops.normalization.moments": (GRID, np.ones((3, 64))),
    "core.ops.normalization.normalize": (GRID, PAIR, ROW, ROW, ROW, GRID),
    "core.ops.normalization.gradient_sums": (GRID, PAIR, ROW, GRID, WIDE),
    "core.ops.normalization.normalize_backward": (GRID, PAIR, ROW, ROW, WIDE, GRID),
    "core.ops.normalization.layer_norm": (GRID, 1e-5, ROW, ROW, GRID, ROW, GRID),
    "core.ops.normalization.layer_norm_backward": (GRID, ROW, ROW, GRID, PAIR),
    "core.ops.pooling._max_pool": (IMAGES, 3, 2, POOLED, PLACES),
    "core.ops.pooling._max_pool_2": (IMAGES, 2, POOLED, PLACES),
    "core.ops.pooling._add_maxima": (POOLED, PLACES, 2, 2, IMAGES),
    "core.ops.pooling._write_maxima": (POOLED, PLACES, 2, IMAGES),
    "core.ops.pooling.average_pool": (IMAGES, 2, 2, POOLED),
    "core.ops.pooling.average_pool_backward": (POOLED, 2, 2, IMAGES),
    "core.ops.windows.copy_windows": (IMAGES, 0, 1, 1, 3, 3, WINDOWS),
    "core.ops.windows.add_windows": (WINDOWS, 0, 1, 1, 3, 3, IMAGES),
    "core.winograd.transform_images": (IMAGES, 0, 1, 1, TILES),
    "core.winograd._transform_points": (ROW,) * 8,
    "core.winograd.transform_products": (TILES, 0, IMAGES),
    "core.winograd._sum_products": (ROW,) * 6,
    "core.winograd.transform_gradients": (IMAGES, 0, TILES),
    "core.winograd._spread_gradients": (ROW,) * 6,
    "data.permutation._bijections": (0, 100, 4, SEED, INDICES),
    "optim.compiled.add_scaled": (ROW, 0.1, ROW),
    "optim.compiled._multiply": (ROW, 0.1),
    "optim.compiled._move_average": (ROW, ROW, 0.1),
    "optim.compiled._sum_squares": (ROW,),
    "strategy.ps.worker_momentum._accelerate": (ROW, ROW, 0.9, 1.0, False),
    "strategy.ps.worker_momentum._mask": (ROW, ROW),
    **{f"optim.rules.{name}": (ROW, ROW, ROW, ROW, CONSTANTS) for name in RULES},
}
# Kernels whose loops need not be vectorized, and why. WORDS are modules whose kernels work on words of shared memory:
# these need not be vectorized either.
SCALAR = {
    "comm.compression_kernels._bin_of": "one element",
    "comm.compression_kernels._scale_of": "a maximum, and a sum in a fixed order",
    "comm.compression_kernels.scatter": "writes to any element",
    "comm.compression_kernels.select_largest": "counts in bins, and writes where elements are large",
    "core.kernels._copy": "copies memory",
    "core.kernels._depth": "one number",
    "core.kernels._sum_tree": "calls _add and _copy",
    "core.ops.activations._gelu": "calls erf and erfc of the C library",
    "core.ops.activations._gelu_backward": "calls exp of the C library",
    "core.ops.losses.sigmoid_gradient": "calls exp and log1p of the C library",
    "core.ops.losses.sigmoid_evaluate": "calls exp and log1p of the C library",
    "core.ops.losses._sigmoid_loss": "one element",
    "core.ops.losses.softmax_evaluate": "calls exp of the C library",
    "core.ops.losses._largest": "a maximum that keeps NaN",
    "core.ops.losses._first_largest": "stops at the first of equal elements",
    "core.ops.dropout._mix": "one element",
    "data.permutation._mix": "one element",
    "data.permutation._bijection": "one element",
    "data.permutation._half_bits": "returns one number",
    "data.permutation._order": "calls _bijections",
    "optim.compiled._keep_gradient": "does nothing",
    "optim.compiled.measure_gradients": "calls sum_rows and _sum_squares",
}
WORDS = (
    "backend.staging.",
    "comm.atomics.",
    "comm.phase_barrier.",
    "comm.rpc.",
    "strategy.ps.collected_steps.",
    "strategy.ps.coordinator.",
    "strategy.ps.counted_steps.",
)

# Vector arithmetic in LLVM's assembly output, for x86 in AT&T syntax.
ARITHMETIC = {
    "x86_64": r"^\s+v?(?:(?:add|sub|mul|div|max|min|sqrt|cmp\w*|fn?m\w+)p[sd]"
    r"|p(?:add|sub|mul|max|min|srl|sll|cmp|mov[sz]x)\w*)\s.*%[xyz]mm|^\s+v(?:blendv|andn)p[sd]\s.*%[yz]mm",
    "aarch64": r"^\s+(?:f?(?:add|sub|mul|div|max|min|maxnm|minnm|sqrt|abs|neg)|fml[as]|ml[as]|fcm\w+|cm\w+|ushr|shl"
    r"|bsl|bit|bif)\s+v\d+\.(?:4s|2d|8h|16b)",
}
# Kernels that only copy have no arithmetic: they must load vectors in a loop, or call memcpy of the C library.
COPIES = {"core.ops.batches.take_rows", "core.ops.windows.copy_windows"}
COPY = {"x86_64": r"^\s+v?movup[sd]\s+-?\d*\(%\w+,%\w+.*\), %[xyz]mm|\bmemcpy\b", "aarch64": r"^\s+ldp\s+q|\bmemcpy\b"}


def kernels() -> dict[str, CPUDispatcher]:
    """Return all kernels of the package, by module and name."""
    found = {}
    for package in PACKAGES:
        folder = importlib.import_module(f"mpitrain.{package}")
        for module in pkgutil.walk_packages(folder.__path__, f"mpitrain.{package}."):
            for name, value in vars(importlib.import_module(module.name)).items():
                if isinstance(value, CPUDispatcher) and value.py_func.__module__ == module.name:
                    found[f"{module.name.removeprefix('mpitrain.')}.{name}"] = value
    return found | {f"optim.rules.{name}": rule.block for name, rule in RULES.items()}


def test_every_kernel_is_listed() -> None:
    assert {name for name in kernels() if not name.startswith(WORDS)} == VECTORIZED.keys() | SCALAR.keys()


@pytest.mark.parametrize("name", VECTORIZED)
def test_loops_are_vectorized(name: str) -> None:
    known = kernels()[name]
    fresh = numba.jit(**known.targetoptions)(known.py_func)
    fresh.compile(tuple(map(numba.typeof, VECTORIZED[name])))
    (code,) = fresh.inspect_asm().values()
    wanted = (COPY if name in COPIES else ARITHMETIC)[platform.machine()]
    assert re.search(wanted, code, re.MULTILINE)
