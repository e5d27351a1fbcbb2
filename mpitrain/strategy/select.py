"""Make a worker's strategy: one of the built-in modes, or a user's class (``--mode package.module:Class``)."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from ..comm.cluster import Cluster
from ..comm.mpi import MPI
from ..core.device import Device
from ..core.training_state import TrainingState
from ..core.words import one_line
from ..errors import ConfigError
from ..optim.whole_tensors import WholeTensorOptimizer
from ..plan.modes import MODES
from ..plan.plan import Plan
from .base import Strategy
from .ps import backup_server
from .ps.asynchronous import AsyncStore
from .ps.backup import BackupStore
from .ps.server import Server
from .sync import Sync
from .sync_gpu import SyncGpu

_ATTRIBUTES = ("synchronous", "params", "grads", "progress", "initial_vectors")
MakeStrategy = Callable[[Cluster, Plan, Sequence[Device], TrainingState], Strategy]


def make_strategy(cluster: Cluster, plan: Plan, devices: Sequence[Device], state: TrainingState) -> Strategy:
    """Return this worker's strategy. Collective over the workers; in modes with servers over all ranks.

    Args:
        devices: The devices of this worker.
        state: Shared with this worker's model.

    Raises:
        ConfigError: ``--mode`` names a class that is no strategy or cannot be imported, or options do not fit the mode.
    """
    mode, virtual = plan.config.mode, plan.config.virtual_workers
    if virtual is not None and 0 < cluster.workers.allreduce(int(devices[0].is_gpu)) < cluster.workers.size:
        raise ConfigError(
            f"--virtual-workers {virtual} gives the same result on any number of workers, but only some of them have a "
            "GPU: pass --device cpu, or remove --virtual-workers",
            on_all_ranks=True,
        )
    with cluster.training.agree("importing the strategy"):
        make = _load(mode.strategy) if mode.name in MODES else _load_class(mode.strategy)
    strategy = make(cluster, plan, devices, state)
    with cluster.training.agree("making the strategy"):
        on_host = devices[0].is_gpu and not devices[0].owns(strategy.params)
        if isinstance(plan.optimizer, WholeTensorOptimizer) and (on_host or not strategy.updates_whole_tensors):
            raise ConfigError(
                f"{plan.optimizer.name} updates whole tensors: it needs --mode sync, or --mode local on CPUs"
            )
        missing = [name for name in _ATTRIBUTES if not hasattr(strategy, name)]
        if missing:
            raise ConfigError(f"--mode {mode.name}: the constructor must set {', '.join(missing)}")
        for option, has_effect in (
            ("--compress", plan.config.compression is None or strategy.compresses_grads),
            ("--virtual-workers", plan.config.virtual_workers is None or strategy.has_virtual_workers),
        ):
            if mode.name not in MODES and not has_effect:
                raise ConfigError(
                    f"{option} works with --mode {mode.name} only if its class is a subclass of "
                    f"mpitrain.strategy.sync.Sync; derive it from Sync, or remove {option}"
                )
        vectors = strategy.initial_vectors
        if vectors is not None and set(vectors) != set(plan.vectors):
            raise ConfigError(
                f"--mode {mode.name}: initial_vectors has the vectors {', '.join(vectors)}; must have those of "
                f"plan.vectors: {', '.join(plan.vectors)}"
            )
    return strategy


def make_server(cluster: Cluster, plan: Plan, state: TrainingState) -> Server:
    """Return this parameter server. Collective over all ranks."""
    if plan.config.mode.drops_late_gradients:
        return backup_server.make_server(BackupStore(cluster, plan, state))
    return Server(AsyncStore(cluster, plan, state))


def sync_strategy(cluster: Cluster, plan: Plan, devices: Sequence[Device], state: TrainingState) -> Strategy:
    """Return the strategy for ``sync``. Collective over the workers.

    Raises:
        ConfigError: The run requests compression, and workers use GPUs; on all workers.
    """
    if not trains_on_gpus(cluster, plan, devices):
        return Sync(cluster, plan, devices, state)
    if plan.config.compression is not None:
        raise ConfigError(
            f"--compress {plan.config.compression} needs workers on CPUs; pass --device cpu, or remove --compress",
            on_all_ranks=True,
        )
    return SyncGpu(cluster, plan, devices, state)


def trains_on_gpus(cluster: Cluster, plan: Plan, devices: Sequence[Device]) -> bool:
    """Return whether every worker's vectors are on its GPU. Collective over the workers, or over the servers."""
    can_be_on_gpu = plan.config.mode.keeps_vectors_on_gpus and devices[0].is_gpu
    return cluster.workers.allreduce(can_be_on_gpu, op=MPI.LAND)


def _load(path: str) -> MakeStrategy:
    """Return the object that ``package.module:name`` names."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)  # type: ignore[no-any-return]


def _load_class(mode: str) -> MakeStrategy:
    """Return the user's class that ``--mode`` names.

    Raises:
        ConfigError: The class cannot be imported, or is not a strategy.
    """
    try:
        strategy: Any = _load(mode)
    except Exception as error:
        why = f"{type(error).__name__}: {one_line(error)}"
        raise ConfigError(f"--mode {mode}: {why}; must name a class in a module that Python can import") from error
    if not isinstance(strategy, type):
        raise ConfigError(f"--mode {mode}: is of type {type(strategy).__name__}, must be a class")
    if "initial_state" in inspect.signature(strategy).parameters:
        raise ConfigError(
            f"--mode {mode}: the constructor takes initial_state; it must take (cluster, plan, devices, state) and set "
            "initial_vectors, which the caller fills before start: see mpitrain.strategy.base.Strategy"
        )
    if not issubclass(strategy, Strategy):
        raise ConfigError(f"--mode {mode}: must be derived from mpitrain.strategy.base.Strategy")
    missing = sorted(strategy.__abstractmethods__)
    if strategy.finish is Strategy.finish and strategy.end_step is Strategy.end_step:
        missing.append("finish")
    if missing:
        raise ConfigError(f"--mode {mode}: {', '.join(missing)} missing; see mpitrain.strategy.base.Strategy")
    if strategy.finish is not Strategy.finish and strategy.end_step is not Strategy.end_step:
        own = strategy.end_step.__qualname__
        raise ConfigError(f"--mode {mode}: {own} does not call finish; override average, update or end_step instead")
    return strategy
