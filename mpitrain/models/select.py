"""Compose the model of a rank from its job's network and the rank's devices."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from ..core.device import Device
from ..core.training_state import TrainingState
from ..errors import JobError
from ..nn.layer import SumOverWorkers
from ..plan.job import Job
from ..plan.layer_network import LayerNetwork
from ..plan.network import Network, make_network
from ..plan.plan import Plan
from .base import Model
from .layers import LayerModel
from .replicas import Exchange, HostExchange, ReplicaAllreduce, Replicas

# Makes a model for one device from a network, the device, its state, and the sum over the workers.
ModelFactory = Callable[[Network, Any, TrainingState, "SumOverWorkers | None"], Model]


def make_model(
    job: Job,
    plan: Plan,
    devices: Sequence[Device],
    state: TrainingState,
    sum_over_workers: SumOverWorkers | None = None,
    resident: bool = False,
) -> Model:
    """Return the model of a rank that computes on ``devices``.

    Args:
        state: Shared with this worker's strategy.
        sum_over_workers: See ``nn.Context``.
        resident: Whether the vectors to which the model will be bound are on the first device, not in host memory.
    """
    make = _maker(job, plan, on_gpus=devices[0].is_gpu, resident=resident)
    if devices[0].is_gpu and not resident:
        make = _with_host_copies(make, plan)
    if len(devices) == 1:
        return make(job.network, devices[0], state, sum_over_workers)
    # The first device uses the job's own network, which hooks may refer to.
    networks = [job.network, *(_copied(job) for _ in devices[1:])]
    exchange, states = _exchange(plan, devices, state, resident)
    allreduce = ReplicaAllreduce(len(devices), sum_over_workers)
    models = [
        make(network, device, own_state, allreduce.summing(index))
        for index, (network, device, own_state) in enumerate(zip(networks, devices, states, strict=True))
    ]
    return Replicas(models, state, exchange, allreduce)


def _maker(job: Job, plan: Plan, on_gpus: bool, resident: bool) -> ModelFactory:
    """Return the function that makes the model for one device."""
    if isinstance(job.network, LayerNetwork):
        return _layers_on_gpus(job, plan) if on_gpus else _layers(plan)
    from .torch_device import TorchDevice
    from .torch_model import TorchModel

    def make(network: Any, device: Any, state: TrainingState, sum_over_workers: SumOverWorkers | None) -> Model:
        if not on_gpus:
            return TorchModel(network, plan, TorchDevice(), job.train_split, state, sum_over_workers)
        from .torch_gpu import TorchGpu

        # A single worker whose vectors are on the GPU needs no gradient before the backward pass has ended.
        announces = not resident or plan.workers > 1
        return TorchModel(network, plan, TorchGpu(device), job.train_split, state, sum_over_workers, announces)

    return make


def _layers(plan: Plan) -> ModelFactory:
    def make(network: Any, device: Any, state: TrainingState, sum_over_workers: SumOverWorkers | None) -> Model:
        return LayerModel(network.model, network.loss, plan, device, state, sum_over_workers)

    return make


def _layers_on_gpus(job: Job, plan: Plan) -> ModelFactory:
    from .layers_gpu import LayerGpuModel

    def make(network: Any, device: Any, state: TrainingState, sum_over_workers: SumOverWorkers | None) -> Model:
        return LayerGpuModel(network.model, network.loss, plan, device, job.train_split, state, sum_over_workers)

    return make


def _with_host_copies(make: ModelFactory, plan: Plan) -> ModelFactory:
    from .host_copies import HostCopies

    def make_with_copies(
        network: Network, device: Any, state: TrainingState, sum_over_workers: SumOverWorkers | None
    ) -> Model:
        model = make(network, device, state, sum_over_workers)
        return HostCopies(model, device, plan.layout.size, plan.dtype, overlaps=network.writes_grads_once)

    return make_with_copies


def _exchange(
    plan: Plan, devices: Sequence[Device], state: TrainingState, resident: bool
) -> tuple[Exchange, Sequence[TrainingState]]:
    """Return the exchange between replicas, and the state of each."""
    size, dtype = plan.layout.size, plan.dtype
    if not resident:
        return HostExchange(len(devices), size, dtype), [state] * len(devices)
    from .replicas_gpu import GpuExchange, states_of_replicas

    states = states_of_replicas(devices, state)
    return GpuExchange(devices, states, size, dtype), states


def _copied(job: Job) -> Network:
    try:
        return make_network(*copy.deepcopy((job.network.model, job.network.loss)))
    except Exception as error:
        raise JobError(
            f"--devices-per-rank: the model cannot be copied for each device ({error}); "
            "its layers may hold only arrays and values; fix them or use --devices-per-rank 1"
        ) from error
