"""Select the model implementation for a rank's devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..core.device import CPU, Device
from ..core.layout import Layout
from ..nn.layer import Layer
from ..nn.loss import Loss
from ..plan.job import Job
from .base import Model
from .native import NativeModel
from .towers import Towers


def make_model(
    job: Job,
    layout: Layout,
    dtype: Any,
    devices: Sequence[Device] = (CPU,),
    say: Callable[[str], None] = lambda line: None,
) -> Model:
    """Return the model of a rank that computes on ``devices``.

    Args:
        say: Prints a line for the user.
    """
    towers = Towers
    if devices[0].is_gpu:
        from .native_gpu import NativeGpuModel
        from .towers_gpu import GpuTowers

        towers = GpuTowers

        def make(model: Layer, loss: Loss, device: Any) -> Model:
            return NativeGpuModel(model, loss, layout, device, job.train, say)
    else:

        def make(model: Layer, loss: Loss, device: Any) -> Model:
            return NativeModel(model, loss, layout, device)

    if len(devices) == 1:
        return make(job.model, job.loss, devices[0])
    return towers(make, job, layout, dtype, devices)
