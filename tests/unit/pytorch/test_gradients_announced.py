"""Gradients of layers that are final before the backward pass has ended."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from mpitrain.core.ranges import announce_nothing  # noqa: E402
from mpitrain.errors import JobError  # noqa: E402

from ...support.torch_modules import Call, DetachedFirst, blocks  # noqa: E402
from ...torch.support import Local, assert_same_training  # noqa: E402
from .test_network_features import making  # noqa: E402


def test_gradients_are_announced_while_earlier_layers_compute() -> None:
    ours = Local(making(lambda: nn.Sequential(*[nn.Linear(6, 6) for _ in range(5)], nn.Linear(6, 3))), bucket_bytes=0)
    ours.train(3)
    assert ours.starts == [bucket.lo for bucket in ours.plan.buckets]
    last = ours.job.model[-1].weight
    assert last.grad.data_ptr() - ours.grads.ctypes.data == 8 * ours.plan.layout.entries[-2].start


def test_gradients_in_more_parts_than_before_are_refused() -> None:
    calls = 1

    def call(module: nn.Module, x: Tensor) -> Tensor:
        hidden = module[0](x)  # type: ignore[index]
        for _ in range(calls):
            hidden = checkpoint(module[1], hidden, use_reentrant=True)  # type: ignore[index]
        return module[2](hidden)  # type: ignore[index]

    ours = Local(making(lambda: Call(blocks(), call)), bucket_bytes=0)
    ours.train(2)
    calls = 3
    with pytest.raises(JobError, match=r"module\.1\.0"):
        ours.step(2)


def test_a_parameter_that_may_have_been_updated_is_not_read() -> None:
    assert_same_training(making(DetachedFirst))
    ours = Local(making(DetachedFirst), bucket_bytes=0)
    ours.step(0)
    with pytest.raises(JobError, match="--bucket-bytes"):
        ours.step(1)


@pytest.mark.parametrize("options", [{"devices_per_rank": 2}, {"accumulate_steps": 2}], ids=str)
def test_gradients_that_nobody_uses_early_are_not_announced(options: dict[str, int]) -> None:
    """Replicas announce nothing, and only the last micro-batch does: a module may then read parameters late."""
    ours = Local(making(DetachedFirst), bucket_bytes=0, **options)
    batch = ours.loader.batch(0, 4)
    ours.accumulation.begin(batch)
    parts = ours.accumulation.parts(batch, ours.micro_batches)
    for part in parts[:-1] or parts:
        for _ in range(3):  # the first backward pass only counts the parts of each gradient
            ours.model.compute_loss(part)
            ours.model.compute_grads(announce_nothing)
