"""Wrapped modules and complex parameters are refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from mpitrain.errors import JobError

from . import models
from .support import Local


def wrapped(kind: type[nn.Module]) -> nn.Module:
    """Return a wrapper without the process group that its constructor needs, and so without the wrapped module."""
    wrapper = kind.__new__(kind)
    nn.Module.__init__(wrapper)
    return wrapper


@pytest.mark.parametrize(
    "make",
    [
        lambda: wrapped(DistributedDataParallel),
        lambda: wrapped(FullyShardedDataParallel),
        lambda: torch.jit.script(models.make("mlp")),
    ],
    ids=["DDP", "FSDP", "script"],
)
def test_wrapped_modules_are_refused_before_they_run(make: Callable[[], nn.Module]) -> None:
    job = models.job()
    job.model = make()
    with pytest.raises(JobError):
        job.network  # noqa: B018


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float16])
def test_parameters_of_other_types_are_refused(dtype: torch.dtype) -> None:
    job = models.job()
    job.loss = lambda outputs, labels: outputs.abs().mean()
    job.model[0].weight = nn.Parameter(job.model[0].weight.to(dtype))
    with pytest.raises(JobError, match=str(dtype)):
        Local(lambda: job)
