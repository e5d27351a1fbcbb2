"""Select the model implementation for a rank's devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..core.device import CPU, Device
from ..nn.layer import Layer, SumOverWorkers
from ..nn.loss import Loss
from ..plan.job import Job
from ..plan.plan import Plan
from .base import Model
from .native import NativeModel
from .towers import Towers


def make_model(
    job: Job, plan: Plan, devices: Sequence[Device] = (CPU,), sum_over_workers: SumOverWorkers | None = None
) -> Model:
    """Return the model of a rank that computes on ``devices``.

    Args:
        sum_over_workers: See ``nn.Context``.
    """
    towers = Towers

    def make(model: Layer, loss: Loss, device: Any, sum_over_workers: SumOverWorkers | None) -> Model:
        return NativeModel(model, loss, plan, device, sum_over_workers)

    if devices[0].is_gpu:
        from .native_gpu import NativeGpuModel
        from .towers_gpu import GpuTowers

        towers = GpuTowers

        def make(model: Layer, loss: Loss, device: Any, sum_over_workers: SumOverWorkers | None) -> Model:
            return NativeGpuModel(model, loss, plan, device, job.train, sum_over_workers)

    if len(devices) == 1:
        return make(job.model, job.loss, devices[0], sum_over_workers)
    return towers(make, job, plan, devices, sum_over_workers)
