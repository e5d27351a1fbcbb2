"""The flat gradient against autograd's, bucket by bucket, and gradients that a script changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402

from mpitrain.core.layout import Layout  # noqa: E402
from mpitrain.core.ranges import announce_nothing, buckets_of  # noqa: E402
from mpitrain.errors import JobError  # noqa: E402
from mpitrain.pytorch.gradients import Gradients  # noqa: E402
from mpitrain.pytorch.linear import write_gradients  # noqa: E402

X, OTHER = torch.randn(5, 4, generator=torch.Generator().manual_seed(1)), torch.ones(3, 4)


class Collected:
    """A module whose gradients are collected in a flat gradient, and the module itself in plain torch."""

    def __init__(self, model: nn.Module, bucket: int = 1, updates_early: bool = True) -> None:
        self.model = model
        self.names, self.params = (list(each) for each in zip(*model.named_parameters(), strict=True))
        self.layout = Layout.pack([(name, tuple(p.shape), "param") for name, p in model.named_parameters()])
        starts = [entry.start for entry in self.layout.entries]
        self.buckets = buckets_of(starts, self.layout.size, bucket)
        self.flat = np.full(self.layout.size, 9.0, np.float32)
        self.views = [torch.from_numpy(view) for view in self.layout.views(self.flat).values()]
        self.gradients = Gradients(self.names, self.params, self.layout, self.buckets, updates_early)
        self.gradients.bind(self.views)

    def step(
        self,
        x: Tensor = X,
        kept: Sequence[int] = (),
        skipped: Sequence[int] = (),
        on_ready: Callable[[int], None] | None = None,
    ) -> list[int]:
        """Collect the gradient of the mean of the outputs; return the announced starts."""
        announced: list[int] = []
        self.gradients.begin_forward()
        loss = self.model(x).square().mean()
        loss.register_hook(self.gradients.set_task)
        with self.gradients.collecting(on_ready or announced.append, kept, skipped):
            loss.backward()
        return announced

    def expected(self, x: Tensor = X) -> list[Tensor]:
        """Return the gradients that autograd computes; zeros for those that it does not compute."""
        loss = self.model(x).square().mean()
        own = [parameter for parameter in self.params if parameter.requires_grad]
        found = iter(torch.autograd.grad(loss, own, allow_unused=True))
        return [g if p.requires_grad and (g := next(found)) is not None else torch.zeros_like(p) for p in self.params]

    def assert_collected(self, expected: Sequence[Tensor]) -> None:
        for name, view, gradient in zip(self.names, self.views, expected, strict=True):
            torch.testing.assert_close(view, gradient, msg=lambda text, name=name: f"{name}: {text}")


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))


BUCKETS = pytest.mark.parametrize("bucket", [1, 1 << 20])  # a bucket for each parameter, or one for all


@pytest.fixture
def three() -> Collected:
    """Three layers, each with buckets of its own."""
    return Collected(mlp())


@pytest.mark.parametrize("bucket", [1, 40, 1 << 20])
@pytest.mark.parametrize("directly", [False, True])
def test_the_flat_gradient_is_that_of_autograd(bucket: int, directly: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    own = Collected(mlp(), bucket)
    if directly:
        monkeypatch.setattr("mpitrain.pytorch.linear.LEAST_ELEMENTS", 1)
        write_gradients(own.model, own.params, own.gradients)
    for step in range(3):
        x = X * (step + 1)
        expected = own.expected(x)
        announced = own.step(x)
        own.assert_collected(expected)
        starts = [bucket.lo for bucket in own.buckets[:-1]]
        if directly and step:  # the gradient of a weight comes before that of its bias; both are announced together
            assert announced == [start for start in starts if start in announced]
            assert bool(announced) == bool(starts)
        else:
            assert announced == (starts if step else [])
        assert all(p.grad is view for p, view in zip(own.params, own.views, strict=True))


def test_an_announced_gradient_is_final(three: Collected) -> None:
    three.step()
    expected = three.expected()

    def check(start: int) -> None:
        for entry, view, gradient in zip(three.layout.entries, three.views, expected, strict=True):
            if entry.start >= start:
                torch.testing.assert_close(view, gradient)

    three.flat[:] = 9
    three.step(on_ready=check)
    assert three.gradients.has_announced


@pytest.mark.parametrize("early", [False, True])
def test_parameters_whose_gradients_are_announced_may_change_only_early(early: bool) -> None:
    own = Collected(mlp(), updates_early=early)
    own.step()
    before = [parameter._version for parameter in own.params]
    own.step()
    assert [after > old for after, old in zip((p._version for p in own.params), before, strict=True)] == [
        early and bucket != len(own.buckets) - 1 for bucket in own.gradients._bucket_of
    ]


def test_nothing_is_announced_for_a_micro_batch(three: Collected) -> None:
    three.step()
    three.step(on_ready=announce_nothing)
    assert three.gradients.has_announced and three.gradients._next == len(three.buckets)


def test_a_parameter_without_a_gradient_gets_zeros(three: Collected) -> None:
    three.params[1].requires_grad_(False)
    for _ in range(2):
        expected = three.expected()
        three.step()
        three.assert_collected(expected)
        assert not three.views[1].any()
    three.params[1].requires_grad_(True)
    three.step()
    three.assert_collected(three.expected())
    three.params[1].requires_grad_(False)
    three.step()
    assert not three.views[1].any()


class Unused(nn.Sequential):
    """Does not use its last module, unless the number of examples is odd."""

    def forward(self, x: Tensor) -> Tensor:
        own = [*self] if len(x) % 2 else [*self][:-1]
        for module in own:
            x = module(x)
        return x


@BUCKETS
def test_a_parameter_that_is_not_used_gets_zeros_in_each_step(bucket: int) -> None:
    """The sums over all ranks are written to the flat gradient after each step."""
    torch.manual_seed(0)
    own = Collected(Unused(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6)), bucket)
    for x in (X[:4], X[:4], X[:4], X, X[:4], X[:4]):
        expected = own.expected(x)
        own.step(x)
        own.assert_collected(expected)
        assert own.views[2].any() == own.views[3].any() == (x is X)
        for view in own.views:
            view += 1


def test_kept_gradients_are_added_to_and_skipped_ones_stay(three: Collected) -> None:
    first, second = three.expected(), three.expected(OTHER)
    three.step()
    three.gradients.collect_grads(lambda: None)
    three.params[5].requires_grad_(False)
    three.step(OTHER, kept=[0, 3], skipped=[5])
    three.assert_collected(
        [first[i] + second[i] if i in (0, 3) else first[i] if i == 5 else second[i] for i in range(6)]
    )


def test_sparse_gradients_become_dense() -> None:
    own = Collected(nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Flatten(0)))
    indices = torch.tensor([1, 1, 4])
    own.gradients.begin_forward()
    loss = own.model(indices).sum()
    with own.gradients.collecting(announce_nothing):
        loss.backward()
    assert own.views[0].tolist() == [[0] * 3, [2] * 3, [0] * 3, [0] * 3, [1] * 3]


def test_gradients_of_bfloat16_are_added_in_float32() -> None:
    model = nn.Linear(4, 2).bfloat16()
    own = Collected(model)
    own.gradients.begin_forward()
    with own.gradients.collecting(announce_nothing):
        model(X.bfloat16()).sum().backward()
    assert own.views[0].dtype == torch.float32
    torch.testing.assert_close(own.views[0], X.bfloat16().float().sum(0).expand(2, 4), rtol=0.02, atol=0.02)
    grads = [parameter.grad for parameter in own.params]
    assert [grad.dtype for grad in grads] == [torch.bfloat16] * 2
    assert torch.equal(grads[0], own.views[0].bfloat16())
    grads[0].mul_(2)  # a script scales the gradient
    own.gradients.collect_grads(lambda: None)
    assert torch.equal(own.views[0], grads[0].float()) and own.params[0].grad is grads[0]
    own.views[0].fill_(3)
    own.gradients.show_grads()
    assert grads[0].eq(3).all()


def test_a_script_may_replace_or_remove_a_gradient(three: Collected) -> None:
    fetched: list[int] = []
    expected = three.expected()
    three.step()
    three.gradients.collect_grads(lambda: fetched.append(1))
    assert not fetched
    three.params[0].grad, three.params[1].grad = torch.full((6, 4), 5.0), None
    three.gradients.collect_grads(lambda: fetched.append(2))
    assert fetched == [2]
    three.assert_collected([torch.full((6, 4), 5.0), torch.zeros(6), *expected[2:]])
    assert all(p.grad is view for p, view in zip(three.params, three.views, strict=True))


def test_hidden_gradients_keep_their_values(three: Collected) -> None:
    three.step()
    before = three.flat.copy()
    three.gradients.hide_grads()
    assert all(parameter.grad is None for parameter in three.params)
    np.testing.assert_array_equal(three.flat, before)
    three.gradients.collect_grads(lambda: pytest.fail("nothing has changed"))
    three.params[2].grad = torch.zeros(6, 6)  # such as by zero_grad(set_to_none=False)
    three.gradients.hide_grads()
    assert three.params[2].grad is None


@BUCKETS
def test_a_gradient_that_would_be_lost_is_refused(bucket: int) -> None:
    own = Collected(mlp(), bucket)
    own.step()
    own.gradients.hide_grads()
    own.model(X).sum().backward()  # not by the trainer
    with pytest.raises(JobError, match=r"0\.weight"):
        own.gradients.hide_grads()


@BUCKETS
def test_a_gradient_that_a_script_computes_and_removes_does_not_matter(bucket: int) -> None:
    own = Collected(mlp(), bucket)
    for _ in range(3):
        own.step()
        own.gradients.hide_grads()
        own.model(X).sum().backward()
        own.model.zero_grad()
    expected = own.expected()
    assert bool(own.step()) == (bucket == 1)
    own.assert_collected(expected)


def test_sums_that_scripts_see(three: Collected) -> None:
    sums, used = [torch.zeros_like(view) for view in three.views], list[int]()
    three.gradients.show_grads_in(sums, lambda: used.append(1))
    expected = three.expected()
    three.step()
    three.assert_collected(expected)
    three.gradients.collect_grads(lambda: None)
    assert not used and not sums[0].any()
    assert three.params[0].grad.norm() == 0 and used == [1]
    three.params[0].grad = torch.ones(6, 4)
    three.gradients.collect_grads(lambda: used.append(2))
    assert used[-1] == 2 and sums[0].eq(1).all()
    three.step()
    with torch._C.DisableTorchFunctionSubclass():  # as autograd adds a gradient that the trainer does not know of
        three.params[1].grad.add_(1)
    with pytest.raises(JobError):
        three.gradients.collect_grads(lambda: None)


def test_only_the_backward_pass_of_the_step_is_collected(three: Collected) -> None:
    seen: list[bool] = []

    class Inner(torch.autograd.Function):
        """Runs another backward pass inside its own."""

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Tensor:
            seen.append(three.gradients.is_collecting)
            with torch.enable_grad():
                inner = torch.ones(1, requires_grad=True)
                inner.register_hook(lambda _: seen.append(three.gradients.is_collecting))
                inner.sum().backward()
            return dy

    three.gradients.begin_forward()
    loss = Inner.apply(three.model(X)).sum()
    loss.register_hook(three.gradients.set_task)
    with three.gradients.collecting(announce_nothing):
        loss.backward()
    assert seen == [True, False] and not three.gradients.is_collecting


def test_more_parts_than_before_are_refused(three: Collected) -> None:
    three.step()
    three.gradients.begin_forward()
    loss = three.model(X).sum()
    loss.register_hook(three.gradients.set_task)

    def compute_twice() -> None:
        with three.gradients.collecting(lambda start: None):
            loss.backward()
            three.model(X).sum().backward()

    with pytest.raises(JobError, match=r"4\."):
        compute_twice()
