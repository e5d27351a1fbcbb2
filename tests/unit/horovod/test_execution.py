"""Which operations are performed together, in which batches, and the rows and factors of a rank."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from mpitrain.horovod import execution  # noqa: E402
from mpitrain.horovod.request import ReduceOp, Request  # noqa: E402


def allreduce(name: str, dtype: object = torch.float32, op: ReduceOp = ReduceOp.Sum, scale: float = 1.0) -> Request:
    return Request("allreduce", name, dtype, ((3,),), op, None, (scale, 1.0))  # type: ignore[arg-type]


def test_only_allreduces_that_are_alike_are_fused() -> None:
    gather = Request("allgather", "g", torch.float32, ((),))
    requests = [
        allreduce("a"),
        gather,
        allreduce("b", torch.float16),
        allreduce("c"),
        allreduce("d", op=ReduceOp.Max),
        allreduce("e", scale=0.5),
        gather._replace(name="h"),
        allreduce("f"),
    ]
    names = [[request.name for request, _ in group] for group in execution.fused([(one, None) for one in requests])]
    assert names == [["a", "c", "f"], ["g"], ["b"], ["d"], ["e"], ["h"]]


@pytest.mark.parametrize("limit", [0, 4, 100, 10_000])
def test_batches_have_at_most_the_limit_or_one_tensor(limit: int) -> None:
    tensors = [torch.full((n,), float(n)) for n in (5, 1, 30, 2, 2, 0, 7, 400)]
    batches = [*execution._batches(tensors, limit)]
    assert [tensor.numel() for batch in batches for tensor in batch] == [tensor.numel() for tensor in tensors]
    for batch, following in zip(batches, [*batches[1:], None], strict=True):
        nbytes = sum(tensor.nbytes for tensor in batch)
        assert len(batch) == 1 or nbytes <= limit
        assert following is None or nbytes + following[0].nbytes > limit  # no batch is smaller than necessary


@pytest.mark.parametrize(("n", "size"), [(7, 3), (2, 3), (0, 2), (12, 4)])
def test_the_first_ranks_get_one_more_row(n: int, size: int) -> None:
    shares = execution._shares(n, size)
    assert sum(shares) == n and shares == sorted(shares, reverse=True) and shares[0] - shares[-1] <= 1


@pytest.mark.parametrize(
    ("dtype", "values", "factor", "expected"),
    [
        (torch.float32, [1.0, -2.5], 0.5, [0.5, -1.25]),
        (torch.int32, [5, -5, 2**24 + 1], 0.5, [2, -2, 2**23]),
        (torch.int64, [3], 1.0, [3]),
        (torch.float16, [3.0], 1 / 3, [1.0]),
        (torch.bfloat16, [256.0, 3.0], 2.0, [512.0, 6.0]),
        (torch.complex64, [1 + 2j], 2.0, [2 + 4j]),
    ],
)
def test_factors(dtype: object, values: list[complex], factor: float, expected: list[complex]) -> None:
    tensor = torch.tensor(values, dtype=dtype)  # type: ignore[arg-type]
    execution.scale([tensor], factor)
    assert tensor.tolist() == expected


def test_a_joined_rank_contributes_zeros() -> None:
    request = Request("allreduce", "a", torch.int64, ((2, 3), ()), ReduceOp.Sum)
    assert [tensor.tolist() for tensor in execution._zeros(request)] == [[0] * 6, [0]]
