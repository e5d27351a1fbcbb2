"""What computes a rank's gradients, by its devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..core.device import CPU, Device
from ..core.layout import Layout
from ..nn.layer import Layer
from ..nn.loss import Loss
from ..plan.job import Job
from .base import Replica
from .native import Single
from .towers import Towers


def replica_of(
    job: Job,
    layout: Layout,
    dtype: Any,
    devices: Sequence[Device] = (CPU,),
    say: Callable[[str], None] = lambda line: None,
) -> Replica:
    """The replica of a rank that computes on ``devices``.

    Args:
        say: Takes a line for the user.
    """
    towers = Towers
    if devices[0].apart:
        from .native_gpu import OnGpu
        from .towers_gpu import GpuTowers

        towers = GpuTowers

        def make(model: Layer, loss: Loss, device: Any) -> Replica:
            return OnGpu(model, loss, layout, device, job.train, say)
    else:

        def make(model: Layer, loss: Loss, device: Any) -> Replica:
            return Single(model, loss, layout, device)

    if len(devices) == 1:
        return make(job.model, job.loss, devices[0])
    return towers(make, job, layout, dtype, devices)
