"""Large linear layers give their weight's gradient to a sink, and compute all else as torch does."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402

from mpitrain.pytorch import linear  # noqa: E402
from mpitrain.pytorch.linear import write_gradients  # noqa: E402


class Sink:
    """Adds up products."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        self.sums = [torch.zeros_like(parameter) for parameter in params]
        self.uses, self.products, self.is_collecting = [0] * len(params), [0] * len(params), True

    def count_use(self, index: int) -> None:
        self.uses[index] += 1

    def add_product(self, index: int, a: Tensor, b: Tensor) -> None:
        self.products[index] += 1
        self.sums[index] += a @ b


def made(model: nn.Module) -> Sink:
    params = list(model.parameters())
    sink = Sink(params)
    write_gradients(model, params, sink)
    return sink


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "LEAST_ELEMENTS", 12)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6, bias=False), nn.Tanh(), nn.Linear(6, 2), nn.Linear(2, 3)).double()


@pytest.mark.parametrize("shape", [(5, 4), (4,), (2, 3, 4), (0, 4)])
def test_gradients_are_those_of_torch(shape: tuple[int, ...]) -> None:
    own, plain = model(), model()
    sink = made(own)
    x = torch.randn(shape, dtype=torch.float64)
    inputs = [x.clone().requires_grad_(), x.clone().requires_grad_()]
    outputs = [own(inputs[0]), plain(inputs[1])]
    assert torch.equal(*outputs)
    for each in outputs:
        each.square().sum().backward()
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad)
    large = {0, 1}  # the weights of at least 12 elements; the bias of the second layer has index 2
    assert sink.uses == sink.products == [1, 1, 0, 0, 0]
    for index, (ours, theirs) in enumerate(zip(own.parameters(), plain.parameters(), strict=True)):
        assert (ours.grad is None) == (index in large)
        torch.testing.assert_close(sink.sums[index] if index in large else ours.grad, theirs.grad)


def test_other_backward_passes_compute_gradients_as_usual() -> None:
    own, plain = model(), model()
    sink = made(own)
    sink.is_collecting = False
    for each in (own, plain):
        each(torch.ones(2, 4).double()).square().sum().backward()
    for ours, theirs in zip(own.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    assert not any(sink.products)


def test_a_gradient_of_a_gradient() -> None:
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    own = model()
    weight = own[0].weight
    made(own)

    def slope(weight_only: bool) -> Tensor:
        loss = own(x).square().sum()
        (first,) = torch.autograd.grad(loss, weight if weight_only else x, create_graph=True)
        return first

    assert slope(True).requires_grad
    torch.autograd.gradcheck(lambda x: own(x), [x])
    torch.autograd.gradgradcheck(lambda x: own(x), [x])


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: layer.weight.requires_grad_(False),
        lambda layer: layer.weight.register_hook(lambda gradient: 2 * gradient),
        lambda layer: layer.bfloat16(),
    ],
    ids=["frozen", "hook", "bfloat16"],
)
def test_layers_that_autograd_must_handle(change: Callable[[nn.Linear], object]) -> None:
    layer = nn.Linear(4, 6)
    sink = made(layer)
    change(layer)
    layer(torch.ones(2, 4, dtype=layer.weight.dtype)).sum().backward()
    assert not any(sink.uses) and layer.bias.grad is not None


def test_calls_that_autograd_must_handle() -> None:
    layer = nn.Linear(4, 6)
    sink = made(layer)
    with torch.no_grad():
        layer(torch.ones(2, 4))
    with torch.autocast("cpu", torch.bfloat16):
        layer(torch.ones(2, 4))
    torch.func.functional_call(layer, {"weight": 2 * layer.weight, "bias": layer.bias}, torch.ones(2, 4))
    torch.func.vmap(layer)(torch.ones(2, 4))
    assert not any(sink.uses)
    layer(torch.ones(2, 4))
    assert sink.uses == [1, 0]


def test_modules_that_are_left_as_they_are() -> None:
    class Own(nn.Linear):
        """A subclass, which may compute something else."""

    hooked = nn.Linear(4, 6)
    hooked.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    own_forward = nn.Linear(4, 6)
    own_forward.forward = lambda x: x  # type: ignore[method-assign]
    parametrized = nn.utils.parametrizations.weight_norm(nn.Linear(4, 6))
    own = nn.ModuleList([Own(4, 6), hooked, own_forward, parametrized, nn.Linear(2, 5), nn.Conv1d(4, 6, 3)])
    before = [vars(module).get("forward") for module in own]
    made(own)
    assert [vars(module).get("forward") for module in own] == before


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_copies_write_to_no_sink(copied: Callable[[nn.Linear], nn.Linear]) -> None:
    layer = nn.Linear(4, 6)
    sink = made(layer)
    other = copied(layer)
    assert torch.equal(other.weight, layer.weight) and "forward" not in vars(other) and "forward" in vars(layer)
    other(torch.ones(1, 4))
    assert not any(sink.uses)
    own = nn.Linear(4, 6)
    own.forward = len  # type: ignore[assignment]
    assert copy.copy(own).forward is len  # a user's own function stays
