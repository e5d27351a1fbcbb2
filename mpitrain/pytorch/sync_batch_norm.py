"""``torch.nn.SyncBatchNorm`` over MPI workers and replicas."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from ..nn.layer import SumOverWorkers


def synchronize(model: nn.Module, sum_over_workers: SumOverWorkers) -> None:
    """Let the ``SyncBatchNorm`` layers of a model compute statistics over the batches of all workers.

    Their ``forward`` and ``backward`` are then collective over the workers.

    Args:
        sum_over_workers: Sums a small float64 array over all workers, in place.
    """
    for module in model.modules():
        if isinstance(module, nn.SyncBatchNorm):
            forward = partial(normalize, module, sum_over_workers)
            # ``torch.compile``, which imports dynamo, would trace the communication, too.
            compiles = "torch._dynamo" in sys.modules
            module.forward = torch.compiler.disable(forward) if compiles else forward  # type: ignore[method-assign]


def normalize(layer: _BatchNorm, sum_over_workers: SumOverWorkers, x: Tensor) -> Tensor:
    """Return the input, of shape (n, channels, ...), normalized like by ``nn.SyncBatchNorm``."""
    if not layer.training:
        running = layer.running_mean, layer.running_var
        return functional.batch_norm(x, *running, layer.weight, layer.bias, running[0] is None, 0.0, layer.eps)
    y, mean, variance, count = _Normalize.apply(x, layer.weight, layer.bias, layer.eps, sum_over_workers)
    if layer.track_running_stats:
        _update_running(layer, mean, variance * (count / (count - 1)))
    return y  # type: ignore[no-any-return]


def _update_running(layer: _BatchNorm, mean: Tensor, variance: Tensor) -> None:
    assert layer.running_mean is not None and layer.running_var is not None and layer.num_batches_tracked is not None
    layer.num_batches_tracked.add_(1)
    share = 1 / float(layer.num_batches_tracked) if layer.momentum is None else layer.momentum
    layer.running_mean.lerp_(mean.to(layer.running_mean.dtype), share)
    layer.running_var.lerp_(variance.to(layer.running_var.dtype), share)


class _Normalize(torch.autograd.Function):
    """Normalizes with the mean and variance of the joined batch of all workers.

    The workers first compute the mean of all rows, then the sum of the squared deviations from the mean. A large mean
    therefore causes no cancellation.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, add_up: Any) -> Any:
        axes = [axis for axis in range(x.dim()) if axis != 1]
        rows = x.numel() // x.shape[1]
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        own_variance, own_mean = (value.double() for value in torch.var_mean(wide, axes, correction=0))
        sums = np.append((own_mean * rows).cpu().numpy(), rows)
        add_up(sums)
        count = float(sums[-1])
        mean = torch.from_numpy(sums[:-1] / count).to(x.device)
        squares = ((own_variance + (own_mean - mean) ** 2) * rows).cpu().numpy()
        add_up(squares)
        variance = torch.from_numpy(squares / count).to(x.device)
        inverse = torch.rsqrt(variance + eps)
        ctx.save_for_backward(x, weight, mean, inverse)
        ctx.count, ctx.add_up, ctx.axes = count, add_up, axes
        y = functional.batch_norm(x, mean.to(wide.dtype), variance.to(wide.dtype), weight, bias, False, 0.0, eps)
        ctx.mark_non_differentiable(mean, variance)
        return y, mean, variance, count

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dy: Tensor, *unused: Any) -> Any:
        x, weight, mean, inverse = ctx.saved_tensors
        shape = [1, -1] + [1] * (x.dim() - 2)
        wide = torch.promote_types(x.dtype, torch.float32)
        centered = x.to(wide) - mean.to(wide).view(shape)
        slope = dy.to(wide)
        sum_dy = slope.sum(ctx.axes, dtype=torch.float64)
        sum_product = (slope * centered).sum(ctx.axes, dtype=torch.float64) * inverse
        dweight = sum_product.to(weight.dtype) if weight is not None else None
        dbias = sum_dy.to(weight.dtype) if weight is not None else None
        sums = torch.stack((sum_dy, sum_product)).cpu().numpy()
        ctx.add_up(sums)
        means = torch.from_numpy(sums / ctx.count).to(x.device)
        scale = inverse if weight is None else inverse * weight.double()
        dx = (slope - means[0].to(wide).view(shape) - centered * (means[1] * inverse).to(wide).view(shape)) * scale.to(
            wide
        ).view(shape)
        return dx.to(x.dtype), dweight, dbias, None, None
