"""Training that continues after a restart: the names of ``horovod.torch.elastic``."""

from __future__ import annotations

from ...basics import init, shutdown
from .run import HostsUpdatedInterrupt, run
from .sampler import ElasticSampler
from .state import ObjectState, State, TorchState

__all__ = ["ElasticSampler", "HostsUpdatedInterrupt", "ObjectState", "State", "TorchState", "init", "run", "shutdown"]
