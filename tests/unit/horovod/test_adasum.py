"""Adasum against its definition in the paper."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from mpitrain.horovod.adasum import combine  # noqa: E402


def of_paper(parts: list[np.ndarray]) -> np.ndarray:
    """Return Adasum of a power of two vectors."""
    if len(parts) == 1:
        return parts[0]
    half = len(parts) // 2
    a, b = of_paper(parts[:half]), of_paper(parts[half:])
    return a * (1 - a @ b / (2 * (a @ a))) + b * (1 - a @ b / (2 * (b @ b)))


@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_powers_of_two_as_in_the_paper(n: int) -> None:
    parts = list(np.random.default_rng(n).standard_normal((n, 50)))
    result = combine([torch.from_numpy(part) for part in parts])
    np.testing.assert_allclose(result.numpy(), of_paper(parts), rtol=1e-12)


@pytest.mark.parametrize("n", [2, 3, 5, 6, 7])
def test_parallel_vectors_give_the_mean_and_orthogonal_ones_the_sum(n: int) -> None:
    vector = np.random.default_rng(n).standard_normal(20)
    parallel = combine([torch.from_numpy(vector * factor) for factor in range(1, n + 1)])
    np.testing.assert_allclose(parallel.numpy(), vector * (n + 1) / 2, rtol=1e-12)
    np.testing.assert_array_equal(combine(list(torch.eye(n).unbind())).numpy(), np.ones(n))


def test_zeros_and_float16() -> None:
    zero, one = torch.zeros(3), torch.tensor([1.0, 2.0, 3.0])
    for parts in ([zero, one], [one, zero]):
        assert combine(parts).tolist() == [1, 2, 3]
    assert combine([zero, zero]).tolist() == [0, 0, 0]
    large = torch.full((4,), 300.0, dtype=torch.float16)  # its square is not a float16 number
    assert combine([large, large]).tolist() == [300] * 4
