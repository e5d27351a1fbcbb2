"""Gradients that tell when a script uses them."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402

from mpitrain.pytorch.watched_gradient import WatchedGradient, watched  # noqa: E402


class Watched:
    """A gradient of zeros, which the first use replaces by ones."""

    def __init__(self) -> None:
        self.memory, self.uses = torch.zeros(2, 3), 0
        self.gradient = watched(self.memory, self._use)

    def _use(self) -> None:
        self.uses += 1
        if self.uses == 1:
            self.memory.fill_(1)


@pytest.mark.parametrize(
    "use",
    [
        lambda g: g.sum().item() == 6,
        lambda g: (g + 1).tolist() == [[2] * 3] * 2,
        lambda g: (1 - g).abs().max() == 0,
        lambda g: g.norm() > 2,
        lambda g: g[0, 1] == 1,
        lambda g: torch.stack([torch.ones(2, 3), g]).min() == 1,
        lambda g: torch.cat(tensors=[g, g]).sum() == 12,
        lambda g: g.clone().eq(1).all(),
        lambda g: copy.deepcopy(g).eq(1).all(),
        lambda g: g.numpy().sum() == 6,
        lambda g: g.tolist() == [[1] * 3] * 2,
        lambda g: g.mul_(2).sum() == 12,
        lambda g: torch._foreach_norm([g])[0] > 2,
        lambda g: "1." in repr(g),
        lambda g: g.data_ptr() != 0,
        lambda g: g.data.sum() == 6,
        lambda g: g.is_contiguous() and g.to(torch.float64).sum() == 6,
    ],
    ids=range(17),
)
def test_a_use_is_noticed_before_the_values_are_read(use: Callable[[Tensor], bool]) -> None:
    own = Watched()
    assert use(own.gradient)
    assert own.uses >= 1


@pytest.mark.parametrize(
    "look",
    [
        lambda g: g.shape == (2, 3),
        lambda g: g.dtype == torch.float32 and g.device.type == "cpu",
        lambda g: not g.requires_grad and g.grad_fn is None,
        lambda g: (g.dim(), g.ndim, g.numel(), g.size(0), g.stride(), len(g)) == (2, 2, 6, 2, (3, 1), 2),
        lambda g: not g.is_sparse and g.layout == torch.strided and g.is_cpu and not g.is_cuda,
        lambda g: g.requires_grad_(False) is g,
    ],
    ids=range(6),
)
def test_properties_are_no_use(look: Callable[[Tensor], bool]) -> None:
    own = Watched()
    assert look(own.gradient)
    assert not own.uses


def test_autograd_adds_to_it_without_a_use() -> None:
    own, parameter = Watched(), nn.Parameter(torch.zeros(2, 3))
    parameter.grad = own.gradient
    (3 * parameter).sum().backward()
    assert parameter.grad is own.gradient and own.memory.eq(3).all() and not own.uses


def test_changes_reach_the_memory_and_results_are_ordinary() -> None:
    own = Watched()
    own.gradient[1, 2] = 5
    assert own.memory.tolist() == [[1, 1, 1], [1, 1, 5]]
    for result in (own.gradient + 1, own.gradient.clone(), copy.deepcopy(own.gradient), own.gradient.view(6)):
        assert type(result) is Tensor
    assert type(own.gradient) is WatchedGradient


def test_a_pickle_has_the_values_only() -> None:
    own, file = Watched(), io.BytesIO()
    loaded: Any = pickle.loads(pickle.dumps(own.gradient))
    assert type(loaded) is Tensor and loaded.eq(1).all()
    torch.save({"g": own.gradient}, file)
    file.seek(0)
    assert type(torch.load(file)["g"]) is Tensor
