"""Normalization: statistics of whole batches, running averages, and statistics over workers."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from mpitrain import nn

from ...support.gradients import bound


@pytest.mark.parametrize("shape", [(3,), (5, 4, 3)])
def test_a_trained_batch_has_mean_0_and_variance_1_in_each_channel(shape):
    norm = nn.BatchNorm(3, eps=0)
    bound(norm, shape)
    x = np.random.default_rng(0).normal(5, 3, (7, *shape))
    rows = norm.forward(x, nn.Context(training=True)).reshape(-1, 3)
    np.testing.assert_allclose(rows.mean(axis=0), 0, atol=1e-12)
    np.testing.assert_allclose(rows.var(axis=0), 1, rtol=1e-12)


def test_single_precision_statistics_survive_a_large_mean():
    norm = nn.BatchNorm(2, eps=0)
    bound(norm, (2,), np.float32)
    x = (1000 + np.random.default_rng(0).standard_normal((4096, 2))).astype(np.float32)
    y = norm.forward(x, nn.Context(training=True)).astype(np.float64)
    np.testing.assert_allclose(y.mean(axis=0), 0, atol=1e-3)
    np.testing.assert_allclose(y.var(axis=0), 1, rtol=1e-3)


def test_a_constant_channel_becomes_its_shift():
    norm = nn.BatchNorm(2)
    bound(norm, (2,), np.float32)
    norm.shift[...] = 3, 4
    y = norm.forward(np.full((9, 2), 0.1, np.float32), nn.Context(training=True))
    np.testing.assert_allclose(y, [[3, 4]] * 9, rtol=1e-4)


def test_the_increments_of_all_batches_move_the_running_statistics_toward_their_mean():
    """The two workers have batches of 4 and 2 examples, so their increments have weights 4/6 and 2/6."""
    batches = np.random.default_rng(0).normal(5, 3, (6, 3))
    total_mean, total_variance = np.zeros(3), np.zeros(3)
    for batch in (batches[:4], batches[4:]):
        norm = nn.BatchNorm(3, momentum=0.9)
        bound(norm, (3,))
        norm.mean[...], norm.variance[...] = 2, 7
        norm.forward(batch, nn.Context(training=True, weight=1 / 6))
        total_mean += norm.mean_grad
        total_variance += norm.variance_grad
    mean = (4 * batches[:4].mean(axis=0) + 2 * batches[4:].mean(axis=0)) / 6
    variance = (4 * batches[:4].var(axis=0) + 2 * batches[4:].var(axis=0)) / 6
    np.testing.assert_allclose(2 + total_mean, 0.9 * 2 + 0.1 * mean)
    np.testing.assert_allclose(7 + total_variance, 0.9 * 7 + 0.1 * variance)


def test_validation_uses_the_running_statistics_and_adds_nothing_to_them():
    norm = nn.BatchNorm(3, eps=0.5)
    _, _, grads = bound(norm, (3,))
    norm.mean[...], norm.variance[...], norm.scale[...], norm.shift[...] = 2, 3, 5, 7
    x = np.random.default_rng(0).standard_normal((4, 3))
    np.testing.assert_allclose(norm.forward(x, nn.Context()), 5 * (x - 2) / np.sqrt(3.5) + 7)
    assert np.isnan(grads).all()


@pytest.mark.parametrize("parts", [(3, 3), (1, 5), (2, 1, 3)])
def test_synchronized_workers_are_one_worker_with_the_joined_batch(parts):
    rng = np.random.default_rng(0)
    x, dy = rng.normal(5, 3, (2, 6, 2, 3))
    (whole,) = trained([x], [dy])
    cuts = np.cumsum(parts)[:-1]
    workers = trained(np.split(x, cuts), np.split(dy, cuts))
    for name in ("y", "dx"):
        joined = np.concatenate([worker[name] for worker in workers])
        np.testing.assert_allclose(joined, whole[name], rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(sum(worker["grads"] for worker in workers), whole["grads"], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("parts", [(64,), (32, 32), (21, 1, 42), (16, 16, 16, 16)])
def test_the_error_does_not_grow_with_the_mean(parts, dtype):
    """The bound is 16 eps times the largest element.

    The relative error of the variance, a sum of 64 rows, is about sqrt(64) / 2 = 4 eps; the square root halves the
    error. The inverse, two subtractions, two products and a sum add 1/2 eps each, so forward has an error of 5 eps.
    Backward has twice as many operations.
    """
    rng = np.random.default_rng(0)
    for offset in (0, 1e3, 1e6, 1e8):
        for deviation in (1e-3, 1, 1e3):
            x = (offset + deviation * rng.standard_normal((64, 2, 3))).astype(dtype)
            dy = rng.standard_normal(x.shape).astype(dtype)
            cuts = np.cumsum(parts)[:-1]
            workers = trained(np.split(x, cuts), np.split(dy, cuts), scale=1, shift=0)
            for name, exact in zip(("y", "dx"), batch_norm_of_80_bits(x, dy), strict=True):
                found = np.concatenate([worker[name] for worker in workers]).astype(np.longdouble)
                error, largest = np.abs(found - exact).max(), np.abs(exact).max()
                assert error <= 16 * np.finfo(dtype).eps * largest, f"{name} of {offset} +- {deviation}"


def batch_norm_of_80_bits(x, dy, eps=1e-5):
    x, dy = (array.reshape(-1, array.shape[-1]).astype(np.longdouble) for array in (x, dy))
    centered = x - x[0]  # small numbers: for x, 80 bits would not be enough
    centered -= centered.mean(axis=0)
    inverse = 1 / np.sqrt((centered**2).mean(axis=0) + np.longdouble(eps))
    y = centered * inverse
    return (a.reshape(-1, 2, 3) for a in (y, inverse * (dy - dy.mean(axis=0) - y * (dy * y).mean(axis=0))))


def test_workers_that_are_not_synchronized_never_communicate():
    def fail(array: np.ndarray) -> None:
        raise AssertionError("communicated")

    norm = nn.BatchNorm(3)
    bound(norm, (3,))
    y = norm.forward(np.ones((4, 3)), nn.Context(training=True, sum_over_workers=fail))
    norm.backward(y.copy())
    synchronized = nn.BatchNorm(3, sync=True)
    bound(synchronized, (3,))
    synchronized.forward(np.ones((4, 3)), nn.Context(sum_over_workers=fail))
    synchronized.backward(y.copy())


def trained(batches, gradients, scale=(1, 2, 3), shift=(4, 5, 6)):
    """Return the outputs and gradients of a synchronized step of BatchNorm, with one thread as worker per batch."""
    summing = Summing(len(batches))
    total = sum(map(len, batches))
    results = [{} for _ in batches]

    def work(i):
        norm = nn.BatchNorm(3, sync=True)
        _, _, grads = bound(norm, (2, 3), batches[i].dtype)
        norm.scale[...], norm.shift[...], norm.mean[...] = scale, shift, (7, 8, 9)
        ctx = nn.Context(training=True, weight=1 / total, sum_over_workers=summing)
        y = norm.forward(batches[i], ctx)
        dx = norm.backward(gradients[i].copy())
        results[i] = {"y": y, "dx": dx, "grads": np.nan_to_num(grads)}

    threads = [threading.Thread(target=work, args=[i]) for i in range(len(batches))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert all(results)
    return results


class Summing:
    """Sums arrays over the threads that act as workers."""

    def __init__(self, n):
        self.barrier = threading.Barrier(n, timeout=60)
        self.arrays = []

    def __call__(self, array):
        self.arrays.append(array)
        self.barrier.wait()
        total = np.sum(self.arrays, axis=0)
        self.barrier.wait()
        array[...] = total
        self.arrays.clear()
        self.barrier.wait()


@pytest.mark.parametrize("shape", [(1, 8), (5,), (3, 2, 4)])
def test_layer_norm_treats_every_place_by_itself(shape):
    norm = nn.LayerNorm(shape[-1], eps=0.25)
    bound(norm, shape)
    rng = np.random.default_rng(0)
    norm.scale[...], norm.shift[...] = rng.standard_normal((2, shape[-1]))
    x = rng.normal(5, 3, (3, *shape))
    y = norm.forward(x, nn.Context(training=True))
    center, variance = x.mean(axis=-1, keepdims=True), x.var(axis=-1, keepdims=True)
    np.testing.assert_allclose(y, (x - center) / np.sqrt(variance + 0.25) * norm.scale + norm.shift, rtol=1e-10)
