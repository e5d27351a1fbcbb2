"""Grids have as many blocks as the device runs at once, or, if blocks add to one sum, a number fixed by the shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mpitrain import optim
from mpitrain.gpu import ops as launch
from mpitrain.gpu.ops import grid, updates

X, OF_COLUMNS, SEGMENT = np.zeros((90_000, 64), np.float32), np.zeros(64, np.float32), np.array([[0, 5_760_000, 1]])
SUMS, IMAGES = np.zeros((2, 64)), np.zeros((128, 32, 32, 8), np.float32)
FACTORS = SEGMENT, np.ones(1), np.zeros(1), np.zeros(1), 0.1
VECTORS = X.reshape(1, -1), np.zeros(1, np.int64), 0, X.reshape(-1)
NONE = np.zeros(0, np.float32)


class Recorder:
    """Records the number of blocks of each launch instead of running it.

    Args:
        resident: The result of ``resident_blocks`` for every kernel.
    """

    def __init__(self, resident: int) -> None:
        self._resident, self.blocks = resident, list[int]()

    def empty(self, shape: Any, dtype: Any) -> np.ndarray:
        return np.empty(shape, dtype)

    def resident_blocks(self, *kernel: Any) -> int:
        return self._resident

    def launch(self, *arguments: Any) -> None:
        *_, (across, down), _, _ = arguments
        self.blocks.append(across * down)


def blocks(resident: int, operation: Callable[[], object]) -> list[int]:
    recorder = Recorder(resident)
    launch.use(recorder)
    operation()
    return recorder.blocks


@pytest.mark.parametrize(
    "operation",
    [
        lambda: launch.add(X, X, X),
        lambda: launch.cast(X, X.astype(np.float16)),
        lambda: launch.drop(X, X, 0, 0, np.zeros(1, np.uint64), 2**31, 2.0),
        lambda: launch.average_pool(IMAGES, 1, 1, IMAGES),
        lambda: launch.layer_norm(X, 1e-5, OF_COLUMNS, OF_COLUMNS, X, X[:, 0].copy(), X),
        lambda: updates.update_segments(*optim.sgd(0.1).fused(0.1, 0), *FACTORS, *VECTORS, NONE, NONE, NONE, 0.0),
    ],
    ids=["add", "cast", "drop", "pool", "layer_norm", "update"],
)
def test_a_grid_has_as_many_blocks_as_run_at_once(operation: Callable[[], object]) -> None:
    assert [blocks(resident, operation) for resident in (132 * 3, 80 * 5)] == [[132 * 3], [80 * 5]]


@pytest.mark.parametrize(
    "operation",
    [
        lambda: launch.softmax_gradient(X, np.zeros(len(X), int), 1.0, X, None),
        lambda: launch.square_gradient(X, X, 1.0, X, None),
        lambda: launch.add_bias_backward(X, "relu", 0.0, X, OF_COLUMNS),
        lambda: launch.moments(X, np.zeros((3, 64))),
        lambda: launch.gradient_sums(X, SUMS.astype(np.float32), OF_COLUMNS, X, SUMS),
    ],
    ids=["softmax", "square", "add_bias_backward", "moments", "gradient_sums"],
)
def test_a_sum_over_blocks_has_the_same_order_on_every_gpu(
    operation: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grid, "SUM_BLOCKS", 1056)  # other tests of this session may have changed it
    few, many = blocks(3, operation), blocks(10_000, operation)
    assert few == many and few[0] > 100


def test_the_tiles_of_a_grid_are_balanced() -> None:
    for down, across, most in [(896, 16, 792), (1, 1, 1), (1, 5000, 660), (10_000, 1, 660), (64, 13, 528), (7, 3, 2)]:
        x, y = grid.balanced(down, across, most)
        assert x <= down and y <= across and x * y <= most
        busiest = -(-down // x) * -(-across // y)
        assert busiest <= max(1.25 * down * across / most, 1) + 1
