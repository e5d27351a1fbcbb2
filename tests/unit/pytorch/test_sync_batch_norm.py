"""Statistics over all workers, which are threads, against BatchNorm of the joined batch."""

from __future__ import annotations

import copy
import functools
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402

from mpitrain.pytorch.sync_batch_norm import normalize, synchronize  # noqa: E402

from ...simulators.simulated_mpi import Comm, World  # noqa: E402

SHAPES = {"rows": (), "sequence": (5,), "images": (3, 2)}


def summing(comm: Comm) -> Any:
    def add_up(array: np.ndarray) -> None:
        assert array.dtype == np.float64
        array[...] = functools.reduce(np.add, comm.allgather(array.copy()))

    return add_up


def parts(counts: list[int], shape: tuple[int, ...], offset: float = 0.0) -> list[Tensor]:
    torch.manual_seed(len(counts))
    return [torch.randn(n, 4, *shape, dtype=torch.float64) * 3 + offset for n in counts]


def of_workers(layer: nn.Module, inputs: list[Tensor], slopes: list[Tensor]) -> list[tuple[Tensor, Tensor, nn.Module]]:
    """Return the output, the gradient of the input, and the layer of each worker."""

    def program(comm: Comm) -> tuple[Tensor, Tensor, nn.Module]:
        own = copy.deepcopy(layer)
        synchronize(own, summing(comm))
        x = inputs[comm.rank].clone().requires_grad_()
        y = own(x)
        y.backward(slopes[comm.rank])
        return y.detach(), x.grad, own

    return World([0] * len(inputs)).run(program)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("counts", [[2], [3, 1, 4]], ids=str)
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("affine", [True, False])
def test_workers_normalize_as_one(
    counts: list[int], shape: tuple[int, ...], momentum: float | None, affine: bool
) -> None:
    inputs, slopes = parts(counts, shape, 100.0), parts(counts, shape)
    layer = nn.SyncBatchNorm(4, momentum=momentum, affine=affine).double()
    plain = nn.BatchNorm1d(4, momentum=momentum, affine=affine).double()
    if affine:
        with torch.no_grad():
            layer.weight.copy_(torch.tensor([1.0, 2.0, -1.0, 0.5]))
        plain.load_state_dict(layer.state_dict())
    joined = torch.cat(inputs).requires_grad_()
    expected = plain(joined.flatten(2) if shape else joined).view_as(joined)
    expected.backward(torch.cat(slopes))
    found = of_workers(nn.Sequential(layer), inputs, slopes)
    torch.testing.assert_close(torch.cat([y for y, _, _ in found]), expected.detach(), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(torch.cat([dx for _, dx, _ in found]), joined.grad, rtol=1e-9, atol=1e-9)
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        for _, _, own in found:
            torch.testing.assert_close(getattr(own[0], name), getattr(plain, name))
    if affine:
        for name in ("weight", "bias"):
            total = sum(getattr(own[0], name).grad for _, _, own in found)
            torch.testing.assert_close(total, getattr(plain, name).grad, rtol=1e-9, atol=1e-9)


def test_a_large_mean_causes_no_cancellation() -> None:
    inputs = [x.float() for x in parts([50, 30], (), 1e4)]
    found = of_workers(nn.SyncBatchNorm(4), inputs, [torch.ones_like(x) for x in inputs])
    outputs = torch.cat([y for y, _, _ in found])
    torch.testing.assert_close(outputs.var(0, correction=0), torch.ones(4), rtol=1e-3, atol=0)


def test_in_evaluation_nothing_is_summed() -> None:
    def never(array: np.ndarray) -> None:
        raise AssertionError

    (x,) = parts([3], (5,))
    for tracks in (True, False):
        layer, plain = (
            kind(4, track_running_stats=tracks).double().eval() for kind in (nn.SyncBatchNorm, nn.BatchNorm1d)
        )
        if tracks:
            layer.running_mean += 2
            plain.load_state_dict(layer.state_dict())
        torch.testing.assert_close(normalize(layer, never, x), plain(x))


def test_other_layers_are_left_as_they_are() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.SyncBatchNorm(2))
    synchronize(model, lambda array: None)
    assert "forward" not in vars(model[0]) and "forward" in vars(model[1])


def test_16_bits_keep_their_type() -> None:
    inputs = [x.bfloat16() for x in parts([4, 4], ())]
    for y, dx, own in of_workers(nn.SyncBatchNorm(4), inputs, [torch.ones_like(x) for x in inputs]):
        assert (y.dtype, dx.dtype, own.weight.grad.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
