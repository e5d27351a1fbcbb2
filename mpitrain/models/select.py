"""Select the model implementation for a job's network and a rank's devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..core.device import Device
from ..core.training_state import TrainingState
from ..nn.layer import SumOverWorkers
from ..plan.job import Job
from ..plan.layer_network import LayerNetwork
from ..plan.plan import Plan
from .base import Model
from .native import NativeModel
from .towers import MakeOne, Towers


def make_model(
    job: Job,
    plan: Plan,
    devices: Sequence[Device],
    state: TrainingState,
    sum_over_workers: SumOverWorkers | None = None,
) -> Model:
    """Return the model of a rank that computes on ``devices``.

    Args:
        state: Shared with this worker's strategy.
        sum_over_workers: See ``nn.Context``.
    """
    if not isinstance(job.network, LayerNetwork):
        make, towers = _torch_on_gpus(job, plan) if devices[0].is_gpu else _torch(plan)
    elif devices[0].is_gpu:
        make, towers = _layers_on_gpus(job, plan)
    else:
        make, towers = _layers(plan)
    if len(devices) == 1:
        return make(job.network, devices[0], state, sum_over_workers)
    return towers(make, job, plan, devices, state, sum_over_workers)


def _layers(plan: Plan) -> tuple[MakeOne, type[Towers]]:
    def make(network: Any, device: Any, state: TrainingState, sum_over_workers: SumOverWorkers | None) -> Model:
        return NativeModel(network.model, network.loss, plan, device, sum_over_workers)

    return make, Towers


def _layers_on_gpus(job: Job, plan: Plan) -> tuple[MakeOne, type[Towers]]:
    from .native_gpu import NativeGpuModel
    from .towers_gpu import GpuTowers

    def make(network: Any, device: Any, state: TrainingState, sum_over_workers: SumOverWorkers | None) -> Model:
        return NativeGpuModel(network.model, network.loss, plan, device, job.train_split, state, sum_over_workers)

    return make, GpuTowers


def _torch(plan: Plan) -> tuple[MakeOne, type[Towers]]:
    from .torch_model import TorchModel
    from .torch_towers import TorchTowers

    def make(network: Any, device: Any, state: TrainingState, sum_over_workers: SumOverWorkers | None) -> Model:
        return TorchModel(network, plan, state, sum_over_workers)

    return make, TorchTowers


def _torch_on_gpus(job: Job, plan: Plan) -> tuple[MakeOne, type[Towers]]:
    from .torch_gpu import TorchGpuModel, TorchGpuTowers

    def make(network: Any, device: Any, state: TrainingState, sum_over_workers: SumOverWorkers | None) -> Model:
        return TorchGpuModel(network, plan, device, job.train_split, state, sum_over_workers)

    return make, TorchGpuTowers
