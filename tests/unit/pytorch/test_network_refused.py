"""Modules, parameters, labels and examples that are refused."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.distributed.fsdp import FullyShardedDataParallel  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from mpitrain import data  # noqa: E402
from mpitrain.errors import DataError, JobError  # noqa: E402

from ...torch import models  # noqa: E402
from ...torch.models import EXAMPLES  # noqa: E402
from ...torch.support import Local  # noqa: E402


def wrapped(kind: type[nn.Module]) -> nn.Module:
    """Return a wrapper without a wrapped module, because the constructor would need a process group."""
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


def test_a_label_that_is_not_a_class_is_named() -> None:
    job = models.job()
    examples, labels = models.arrays("mlp")
    labels[5] = 7
    job.train = data.from_arrays(examples, labels)
    with pytest.raises(DataError, match=r"label 7 of example 5 .* 0 to 2"):
        Local(lambda: job, seed=0).train(EXAMPLES // 4)


def test_streams_need_their_number_of_examples() -> None:
    job = models.job()
    job.train = data.from_arrays(*models.arrays("mlp")).ordered(data.orders.Streams(6))
    Local(lambda: job, batch_size=6)
    with pytest.raises(DataError, match=r"Streams\(6\).*Streams\(4\)"):
        Local(lambda: job, batch_size=4)


def test_validation_examples_that_the_model_does_not_accept() -> None:
    """Modules are tried before training, in evaluation mode, which must not change the module's statistics."""
    job = models.job("cnn")
    examples, labels = models.arrays("cnn")
    job.validation = data.from_arrays(examples[:, :-1], labels)
    statistics = {name: buffer.clone() for name, buffer in job.model.named_buffers()}
    with pytest.raises(JobError, match="of validation"):
        Local(lambda: job)
    assert all(torch.equal(buffer, statistics[name]) for name, buffer in job.model.named_buffers())
    assert job.model.training


def test_images_in_the_order_of_files_get_advice() -> None:
    images = np.zeros((4, 8, 8, 3), np.uint8)
    job = models.job()
    job.model, job.validation = nn.Sequential(nn.Conv2d(3, 2, 3), nn.Flatten(), nn.Linear(72, 3)), None
    job.train = [(image, 0) for image in images]
    with pytest.raises(JobError, match="channels, height, width"):
        Local(lambda: job)
