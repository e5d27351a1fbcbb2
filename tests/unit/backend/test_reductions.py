"""Reductions of every type against NumPy, and those that are not defined."""

from __future__ import annotations

from functools import reduce
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from mpitrain.backend.reductions import reduction_of  # noqa: E402

ReduceOp = torch.distributed.ReduceOp
OF_NUMPY = {
    "SUM": np.add,
    "AVG": np.add,
    "PRODUCT": np.multiply,
    "MIN": np.minimum,
    "MAX": np.maximum,
    "BAND": np.bitwise_and,
    "BOR": np.bitwise_or,
    "BXOR": np.bitwise_xor,
}
INTEGERS = ("uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64")


def parts_of(dtype: str, count: int) -> list[np.ndarray]:
    rng = np.random.default_rng(count)
    if dtype in INTEGERS:
        return list(rng.integers(0, 6, (count, 9)).astype(dtype))
    return list((3 * rng.standard_normal((count, 9))).astype(dtype))


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("name", OF_NUMPY)
@pytest.mark.parametrize("dtype", [*INTEGERS, "float32", "float64"])
def test_types_and_reductions_of_numpy(dtype: str, name: str, count: int) -> None:
    if name in ("BAND", "BOR", "BXOR") and dtype not in INTEGERS:
        with pytest.raises(ValueError, match=dtype):
            reduction_of(getattr(ReduceOp, name), getattr(torch, dtype))
        return
    parts = parts_of(dtype, count)
    out = torch.empty(9, dtype=getattr(torch, dtype))
    reduction = reduction_of(getattr(ReduceOp, name), out.dtype)
    reduction([torch.from_numpy(part.copy()) for part in parts], out)
    reduction.finish(out, count)
    expected = reduce(OF_NUMPY[name], parts)
    if name == "AVG":
        expected = expected // count if dtype in INTEGERS else expected / expected.dtype.type(count)
    np.testing.assert_array_equal(out.numpy(), expected)
    assert reduction.is_sum == (name in ("SUM", "AVG"))


@pytest.mark.parametrize("first", [0, 1])
def test_the_result_may_be_one_of_the_first_two(first: int) -> None:
    parts = [torch.tensor([float(value)]) for value in (1, 20, 300)]
    reduction_of(ReduceOp.SUM, torch.float32)(parts, parts[first])
    assert parts[first].item() == 321


def test_means_of_integers_are_truncated() -> None:
    sums = torch.tensor([7, -7, 6])
    reduction_of(ReduceOp.AVG, torch.int64).finish(sums, 2)
    assert sums.tolist() == [3, -3, 3]


@pytest.mark.parametrize("op", [ReduceOp.MIN, ReduceOp.MAX, ReduceOp.BAND])
def test_complex_numbers_have_no_order(op: Any) -> None:
    with pytest.raises(ValueError, match="complex64"):
        reduction_of(op, torch.complex64)
    mean, out = reduction_of(ReduceOp.AVG, torch.complex64), torch.zeros(1, dtype=torch.complex64)
    mean([torch.tensor([2 + 4j]), torch.tensor([4 - 2j])], out)
    mean.finish(out, 2)
    assert out.item() == 3 + 1j


def test_a_reduction_that_the_backend_lacks() -> None:
    with pytest.raises(ValueError, match="PREMUL_SUM"):
        reduction_of(ReduceOp.PREMUL_SUM, torch.float32)
