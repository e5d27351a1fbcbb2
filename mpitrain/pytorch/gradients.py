"""Collects the gradients of a PyTorch module in the flat gradient."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from ..core.layout import Layout
from ..core.ranges import Bucket, OnReady, announce_nothing
from ..errors import JobError
from .bfloat16 import is_copied
from .watched_gradient import OnUse, watched

_NOT_COLLECTED = (
    "the gradient of {} was not computed by trainer.backward and would be lost: call trainer.backward for every loss, "
    "or change the gradient between trainer.backward and step"
)


class Gradients:
    """Collects a module's gradients in the flat gradient, bucket by bucket, while backward computes earlier layers.

    On CPUs, large linear layers write the gradients of their weights to the flat gradient (``pytorch.linear``).
    For other parameters, autograd allocates new memory for the gradient, which is cheaper than adding to the flat
    gradient. The gradient is copied to the flat gradient when its bucket is complete. ``param.grad`` is then the view
    of the flat gradient. Parameters without a gradient in this step get zeros.

    The gradient of a parameter in bfloat16 is added to the flat gradient after the backward pass, in the flat
    gradient's type. Scripts get a copy of this gradient.

    A parameter's gradient may be computed in several parts: one for each use by a large linear layer, one by autograd,
    more with reentrant checkpointing. A gradient counts as complete when it has a part for each use, and as many other
    parts as in earlier steps. The first step announces nothing before its end.

    Args:
        names, params: The parameters.
        layout: The layout that contains the parameters.
        buckets: The ranges to announce, last first.
        updates_early: Whether parameters may be updated as soon as their gradients are announced.
    """

    def __init__(
        self,
        names: Sequence[str],
        params: Sequence[nn.Parameter],
        layout: Layout,
        buckets: Sequence[Bucket],
        updates_early: bool,
    ) -> None:
        self._names, self._params, self._updates_early = names, params, updates_early
        for parameter in params:
            parameter.grad = None  # of passes before the training
        starts = {entry.name: entry.start for entry in layout.entries}
        self._bucket_of = [_bucket(buckets, starts[name]) for name in names]
        self._members = [[i for i, own in enumerate(self._bucket_of) if own == b] for b in range(len(buckets))]
        self._starts = [bucket.lo for bucket in buckets]
        self._hooked: list[Any] = [None] * len(params)
        # Uses of each parameter by layers that will call ``add_product``, and the number of calls in this pass.
        self._uses, self._products = [0] * len(params), [0] * len(params)
        # Number of parts of each gradient in earlier steps, without calls of ``add_product``.
        self._others: list[int] | None = None
        self._views: list[Tensor] = []  # of the flat gradient
        self._sums: list[Tensor] = []  # the gradients that scripts see
        self._shown: list[Tensor] = []  # ``_sums``, tensors that share their memory, or copies
        self._copied = [index for index, param in enumerate(params) if is_copied(param)]
        self._versions: dict[int, int] = {}  # versions of the copies when they were last equal to the views
        self._is_shown = [False] * len(params)  # whether ``param.grad`` was set to the shown tensor
        self._skipped: Collection[int] = ()  # parameters whose gradients do not change in this pass
        self._next = 0  # the first bucket that is not complete
        self._written: set[int] = set()  # parameters whose views contain a part or all of the gradient
        self._is_used = False  # whether the script has used a gradient since the last pass
        self._unused_versions: list[int] = []  # versions of the shown tensors while the script has not used them
        self._is_zero = [False] * len(params)  # whether the view of a parameter that is frozen is zero
        self._task: int | None = None

    def bind(self, views: list[Tensor]) -> None:
        """Write to ``views``, one for each parameter, from now on."""
        if [view.data_ptr() for view in views] == [view.data_ptr() for view in self._views]:
            return  # ``param.grad`` is one of the tensors that are shown already
        self._views, self._sums, self._shown = views, views, [*views]
        for i in self._copied:
            self._shown[i], self._versions[i] = torch.zeros_like(views[i], dtype=torch.bfloat16), 0

    def show_grads_in(self, sums: list[Tensor], on_use: OnUse) -> None:
        """Let scripts see ``sums``, one for each parameter, from now on; call ``on_use`` before they use one."""
        self._sums = sums
        copied = set(self._copied)

        def use() -> None:
            self._is_used = True
            on_use()

        self._shown = [self._shown[i] if i in copied else watched(sums[i], use) for i in range(len(sums))]

    def show_grads(self) -> None:
        """Update the copies of the flat gradient that scripts see."""
        if self._copied:
            self._set_copies(self._copied)

    def _set_copies(self, indices: Sequence[int]) -> None:
        """Set the copies of these gradients, which belong to parameters in bfloat16, to the flat gradient."""
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            torch._foreach_copy_([self._shown[i] for i in indices], [self._sums[i] for i in indices])
            self._versions |= {i: self._shown[i]._version for i in indices}

    def collect_grads(self, fetch: Callable[[], None]) -> None:
        """Copy gradients that the script has replaced to those that it sees; where it has removed one, set zeros.

        Args:
            fetch: Called before these are changed.
        """
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            if not self._is_used and self._unused_versions != self._versions_if_apart():
                raise JobError(_NOT_COLLECTED.format("a parameter"))
            changed = [i for i, parameter in enumerate(self._params) if self._is_changed(i, parameter)]
            if changed:
                fetch()
            for i in changed:
                gradient = self._params[i].grad
                if gradient is None:
                    self._sums[i].zero_()
                else:
                    self._sums[i].copy_(gradient)
                self._params[i].grad, self._is_shown[i] = self._shown[i], True
            if copied := [i for i in changed if i in self._versions]:
                self._set_copies(copied)

    def _is_changed(self, i: int, parameter: nn.Parameter) -> bool:
        """Return whether the script has replaced or removed this gradient, or changed its copy."""
        if parameter.grad is not self._shown[i]:
            return parameter.grad is not None or self._is_shown[i]
        return i in self._versions and self._shown[i]._version != self._versions[i]

    def _versions_if_apart(self) -> list[int]:
        """Return the versions of the watched tensors, which autograd changes without a use."""
        if self._sums is self._views:
            return []
        return [shown._version for i, shown in enumerate(self._shown) if i not in self._versions]

    def hide_grads(self) -> None:
        """Let the script see no gradients; their values stay.

        Raises:
            JobError: There are gradients that this object has not collected.
        """
        self._hide(range(len(self._params)))

    def _hide(self, indices: Iterable[int]) -> None:
        for i in indices:
            parameter = self._params[i]
            gradient = parameter.grad
            if gradient is not None and gradient is not self._shown[i] and (gradient.is_sparse or gradient.any()):
                raise JobError(_NOT_COLLECTED.format(self._names[i]))
            parameter.grad, self._is_shown[i] = None, False

    @property
    def is_collecting(self) -> bool:
        """Whether the backward pass of the training step runs, and no other backward pass inside it."""
        return self._task is not None and torch._C._current_graph_task_id() == self._task

    def set_task(self, _: Tensor) -> None:
        """Record that the current backward pass is that of the training step; called as a hook of the loss."""
        self._task = torch._C._current_graph_task_id()

    def count_use(self, index: int) -> None:
        """Expect a call of ``add_product`` in this step."""
        self._uses[index] += 1

    @property
    def has_announced(self) -> bool:
        """Whether some buckets were announced before the end of the last backward pass."""
        return self._next > 0

    def begin_forward(self) -> None:
        """Prepare for the forward pass of a batch."""
        self._uses = [0] * len(self._params)

    @property
    def expects_products(self) -> bool:
        """Whether the forward pass has announced calls of ``add_product``."""
        return any(self._uses)

    @contextmanager
    def collecting(
        self, on_ready: OnReady, kept: Collection[int] = (), skipped: Collection[int] = ()
    ) -> Iterator[None]:
        """Collect the gradients that are computed in this context; call ``on_ready`` with the starts of buckets.

        Args:
            kept: The parameters to whose gradients, as ``collect_grads`` has left them, the new ones are added.
            skipped: The parameters whose gradients are not computed, and stay as they are.
        """
        self._on_ready, self._next = on_ready, 0
        self._written, self._skipped = set(kept), skipped
        self._hide(i for i in range(len(self._params)) if i not in skipped)
        counts_parts = len(self._members) > 1 or self.expects_products
        if counts_parts:
            self._begin_counting()
        try:
            yield
        finally:
            self._task = None
        if counts_parts:
            others = [parts - uses for parts, uses in zip(self._parts, self._uses, strict=True)]
            self._others = others if self._others is None else list(map(max, others, self._others))
            # A script may have computed losses whose backward passes follow.
            self._uses = [uses - products for uses, products in zip(self._uses, self._products, strict=True)]
        while self._next < len(self._members):
            self._collect(self._members[self._next])
            self._next += 1
        with torch._C.DisableTorchFunctionSubclass():
            self._is_used, self._unused_versions = False, self._versions_if_apart()

    def _begin_counting(self) -> None:
        """Prepare to count the parts of each gradient, which shows when a bucket is complete."""
        self._parts, self._products = [0] * len(self._params), [0] * len(self._params)
        others = [-1 - uses for uses in self._uses] if self._others is None else self._others
        self._parts_expected = [uses + other for uses, other in zip(self._uses, others, strict=True)]
        self._missing = [sum(self._params[i].requires_grad for i in members) for members in self._members]
        if len(self._members) > 1:
            self._add_hooks()

    def add_product(self, index: int, a: Tensor, b: Tensor) -> None:
        """Add the product of two matrices to the gradient of a parameter, as a part of this gradient."""
        if index in self._written:
            self._views[index].addmm_(a, b)
        else:
            torch.mm(a, b, out=self._views[index])
            self._written.add(index)
        self._products[index] += 1
        self._count_part(index)

    def _add_hooks(self) -> None:
        for index, parameter in enumerate(self._params):
            if parameter.requires_grad and self._hooked[index] is None:
                self._hooked[index] = parameter.register_post_accumulate_grad_hook(partial(self._count_part, index))

    def _count_part(self, index: int, *_: Tensor) -> None:
        """Count a part of a parameter's gradient as computed, unless a script computes it outside of the step."""
        if self._task is None:
            return
        bucket = self._bucket_of[index]
        parts = self._parts[index] = self._parts[index] + 1
        if parts == self._parts_expected[index]:
            self._missing[bucket] -= 1
            if not self._missing[bucket] and self._on_ready is not announce_nothing:
                self._advance()
        elif bucket < self._next:
            raise JobError(
                f"the gradient of {self._names[index]} was computed in more parts than in earlier steps; with "
                "gradient checkpointing, use checkpoint(..., use_reentrant=False)"
            )

    def _advance(self) -> None:
        """Announce the buckets that are complete; the last layers' come first."""
        before = self._next
        while self._next < len(self._members) and not self._missing[self._next]:
            self._collect(self._members[self._next])
            self._next += 1
        if before < self._next < len(self._members):  # the caller announces the last bucket
            self._on_ready(self._starts[self._next - 1])
            if not self._updates_early:
                return
            # The strategy may have changed these parameters; autograd must refuse to read them in this backward pass.
            increment_version([self._params[i] for members in self._members[before : self._next] for i in members])

    def _collect(self, members: Sequence[int]) -> None:
        """Copy the gradients of a bucket's parameters to the flat gradient."""
        targets, sources = [], []
        with torch.no_grad():
            for i in members:
                if i in self._skipped:
                    continue
                gradient, view = self._params[i].grad, self._views[i]
                if gradient is None and i not in self._written:
                    if not self._is_zero[i]:
                        view.zero_()
                    self._is_zero[i] = not self._params[i].requires_grad
                    if self._params[i].requires_grad:  # another rank, or an earlier micro-batch, may have used it
                        self._params[i].grad, self._is_shown[i] = self._shown[i], True
                    continue
                self._is_zero[i] = False
                if gradient is not None and gradient.is_sparse:
                    gradient = gradient.to_dense()
                if gradient is not None and i in self._written:
                    view.add_(gradient)
                elif gradient is not None:
                    targets.append(view)
                    sources.append(gradient)
                self._params[i].grad, self._is_shown[i] = self._shown[i], True
            if targets:
                torch._foreach_copy_(targets, sources)
        if self._sums is self._views and (copied := [i for i in members if i in self._versions]):
            self._set_copies(copied)


def _bucket(buckets: Sequence[Bucket], start: int) -> int:
    return next(index for index, bucket in enumerate(buckets) if bucket.lo <= start < bucket.hi)
