"""``DistributedOptimizer``: an optimizer of torch whose gradients are reduced over all ranks before each step."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..process_sets import ProcessSet, global_process_set
from ..request import Handle, ReduceOp
from .compression import Compression, Compressor, check_compression, compress
from .functions import broadcast_object
from .operations import allreduce_, grouped_allreduce_async_, sparse_allreduce_async
from .submission import Adasum, Average, synchronize

Named = list[tuple[str, nn.Parameter]]


def DistributedOptimizer(  # noqa: N802
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, nn.Parameter]] | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReduceOp | int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return an optimizer with the class of ``optimizer``, whose state and parameter groups it shares.

    Its gradients are submitted during ``backward``, and reduced when ``step`` or ``synchronize`` waits for them.
    Gradients that a rank has not computed count as zeros. Local; ``step`` is collective over the process set.

    Args:
        named_parameters: For example ``model.named_parameters()``; None names parameters by their position.
        backward_passes_per_step: Number of calls of ``backward`` whose gradients a step adds up.
        op: Average, Sum or Adasum. With Adasum the changes of the parameters are combined, not the gradients.
        gradient_predivide_factor: Gradients are divided by this factor before the sum, and the sum is divided by
            ``size() / gradient_predivide_factor``.
        num_groups: Deprecated; use ``groups``.
        groups: Gradients that are submitted together: a number of groups, or lists of parameters.
        sparse_as_dense: Whether to reduce sparse gradients as dense gradients.

    Raises:
        ValueError: An argument is not valid.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(f"DistributedOptimizer takes an optimizer of torch.optim, not {type(optimizer).__name__}")
    if isinstance(optimizer, _Distributed):
        raise ValueError("the optimizer is distributed already; call DistributedOptimizer once")
    op = ReduceOp(op)
    check_compression(compression)
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError(f"gradient_predivide_factor needs op=Average, not {op.name}")
    if num_groups:
        warnings.warn("num_groups is deprecated; use groups", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    if backward_passes_per_step <= 0:
        raise ValueError(f"backward_passes_per_step must be at least 1, not {backward_passes_per_step}")
    if op == Adasum and process_set is not global_process_set:
        raise NotImplementedError("Adasum works on all ranks only; use Average or Sum with a process set")
    named = _named(optimizer, named_parameters)
    kind = type(optimizer)
    made: Any = type(kind.__name__, (_Distributed, kind), {"__module__": __name__})
    wrapped = made.__new__(made)
    # A scheduler that was made earlier may have replaced ``step`` of the wrapped optimizer.
    wrapped.__dict__.update({key: value for key, value in vars(optimizer).items() if key != "step"})
    wrapped._set_up(named, compression, backward_passes_per_step, op, gradient_predivide_factor, sparse_as_dense)
    wrapped._start(groups, process_set)
    return wrapped


def _named(optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, nn.Parameter]] | None) -> Named:
    """Return the names and parameters of an optimizer.

    Raises:
        ValueError: Names occur twice, or a parameter has none.
    """
    if named is None:
        return [
            (f"allreduce.noname.{at}.{index}", parameter)
            for at, group in enumerate(optimizer.param_groups)
            for index, parameter in enumerate(group["params"])
        ]
    pairs = list(named)
    if any(not isinstance(pair, tuple) for pair in pairs):
        raise ValueError("named_parameters takes pairs of a name and a parameter, such as model.named_parameters()")
    twice = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
    if twice:
        raise ValueError(f"named_parameters has these names more than once: {', '.join(twice)}")
    ids = {id(parameter) for _, parameter in pairs}
    missing = sum(id(parameter) not in ids for group in optimizer.param_groups for parameter in group["params"])
    if missing:
        raise ValueError(
            f"named_parameters lacks {missing} of the optimizer's parameters; pass all parameters, or None"
        )
    return pairs


def _call_all(functions: Iterable[Callable[[], None]]) -> None:
    for function in functions:
        function()


class _Distributed(torch.optim.Optimizer):
    """The methods that are added to the class of the optimizer."""

    def _set_up(
        self,
        named: Named,
        compression: type[Compressor],
        passes: int,
        op: ReduceOp,
        predivide: float,
        sparse_as_dense: bool,
    ) -> None:
        self._parameter_names = {parameter: name for name, parameter in named}
        self._compression, self._op, self._sparse_as_dense = compression, op, sparse_as_dense
        self._scales = (1 / predivide, predivide)
        self.backward_passes_per_step = passes
        self._group_of: dict[Tensor, tuple[Tensor, ...]] = {}
        self._passes_left: dict[Tensor, int] = {}
        # For each group, the number of gradients that are not complete.
        self._missing: dict[tuple[Tensor, ...], int] = {}
        self._submitted: dict[tuple[Tensor, ...], Callable[[], None]] = {}
        self._synchronized, self._should_synchronize = False, True

    def _start(self, groups: int | Sequence[Sequence[Tensor]] | None, process_set: ProcessSet) -> None:
        self._process_set = process_set
        parameters = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        if not process_set.included() or process_set.size() == 1:
            return
        for group in self._groups(parameters, groups):
            self._group_of |= dict.fromkeys(group, group)
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._accumulated)
        self.set_backward_passes_per_step(self.backward_passes_per_step)

    def _groups(
        self, parameters: list[Tensor], groups: int | Sequence[Sequence[Tensor]] | None
    ) -> list[tuple[Tensor, ...]]:
        """Return groups of parameters of one type, whose gradients are submitted together."""
        if groups is None:
            return [(parameter,) for parameter in parameters]
        if isinstance(groups, int):
            if groups < 0:
                raise ValueError(f"groups must be a number of groups or lists of parameters, not {groups}")
            names = broadcast_object([self._name(p) for p in parameters], 0, "groups", self._process_set)
            ordered = sorted(parameters, key=lambda parameter: names.index(self._name(parameter)))
            n = min(max(groups, 1), len(ordered)) or 1
            lists = [ordered[len(ordered) * at // n : len(ordered) * (at + 1) // n] for at in range(n)]
        else:
            lists = [[p for p in group if any(p is other for other in parameters)] for group in groups]
            listed = [id(p) for group in groups for p in group]
            if len(set(listed)) < len(listed) or any(not isinstance(p, Tensor) for group in groups for p in group):
                raise ValueError("groups must consist of parameters, each of which occurs once")
            lists += [[p] for p in parameters if id(p) not in listed]
        by_type: dict[tuple[int, torch.dtype], list[Tensor]] = {}
        for at, group in enumerate(lists):
            for parameter in group:
                by_type.setdefault((at, parameter.dtype), []).append(parameter)
        return [tuple(group) for group in by_type.values()]

    def _name(self, parameter: Tensor) -> str:
        return self._parameter_names[parameter]  # type: ignore[index]

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set the number of calls of ``backward`` whose gradients a step adds up. Local."""
        self.backward_passes_per_step = passes
        self._passes_left = dict.fromkeys(self._group_of, passes)
        self._missing = {group: len(group) for group in self._group_of.values()}

    # Submitting gradients.

    def _accumulated(self, parameter: Tensor) -> None:
        """Called after ``backward`` has computed a gradient."""
        self._passes_left[parameter] -= 1
        if self._passes_left[parameter] < 0:
            raise AssertionError(
                "gradients were computed more than backward_passes_per_step times before step(); "
                "increase backward_passes_per_step, or call step() or synchronize() in between"
            )
        if self._passes_left[parameter]:
            return
        group = self._group_of[parameter]
        self._missing[group] -= 1
        if not self._missing[group]:
            self._submit(group)

    def _submit(self, group: tuple[Tensor, ...]) -> None:
        for parameter in group:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        grads = [parameter.grad for parameter in group]
        if any(grad.is_sparse for grad in grads) and not self._sparse_as_dense:  # type: ignore[union-attr]
            parts = [self._submit_sparse(parameter) for parameter in group]
            self._submitted[group] = lambda: _call_all(parts)
        elif self._op == Adasum:
            self._submitted[group] = self._submit_change(group)
        else:
            self._submitted[group] = self._submit_dense(group)

    def _submit_dense(self, group: tuple[Tensor, ...]) -> Callable[[], None]:
        grads: list[Any] = [parameter.grad for parameter in group]
        dense = [grad.to_dense() if grad.is_sparse else grad for grad in grads]
        handle, contexts = self._reduce(dense, self._name(group[0]))

        def finish() -> None:
            for parameter, grad, reduced, context in zip(group, grads, synchronize(handle), contexts, strict=True):
                result = self._compression.decompress(reduced, context)
                if grad.is_sparse:
                    parameter.grad = result.to_sparse()
                elif result is not parameter.grad:
                    grad.copy_(result)

        return finish

    def _reduce(self, tensors: Sequence[Tensor], name: str) -> tuple[Handle, Sequence[Any]]:
        compressed, contexts = compress(self._compression, tensors)
        scales = self._scales if self._op == Average else (1.0, 1.0)
        handle = grouped_allreduce_async_(compressed, None, name, self._op, *scales, self._process_set)
        return handle, contexts

    def _submit_sparse(self, parameter: Tensor) -> Callable[[], None]:
        assert parameter.grad is not None
        result = sparse_allreduce_async(parameter.grad, self._name(parameter), self._op, self._process_set)

        def finish() -> None:
            parameter.grad = result()

        return finish

    def _submit_change(self, group: tuple[Tensor, ...]) -> Callable[[], None]:
        """Step these parameters alone, and combine their changes by Adasum."""
        starts = [parameter.detach().clone() for parameter in group]
        all_parameters = [entry["params"] for entry in self.param_groups]
        for entry in self.param_groups:
            entry["params"] = [p for p in entry["params"] if any(p is other for other in group)]
        try:
            super().step()
        finally:
            for entry, parameters in zip(self.param_groups, all_parameters, strict=True):
                entry["params"] = parameters
        changes = [parameter.detach() - start for parameter, start in zip(group, starts, strict=True)]
        handle, contexts = self._reduce(changes, self._name(group[0]))

        def finish() -> None:
            for parameter, start, change, context in zip(group, starts, synchronize(handle), contexts, strict=True):
                parameter.detach().copy_(start + self._compression.decompress(change, context))

        return finish

    # Stepping.

    def synchronize(self) -> None:
        """Wait until the gradients are reduced. Collective over the process set."""
        for group in self._missing:
            if group not in self._submitted:
                self._submit(group)
        for finish in self._submitted.values():
            finish()
        self._submitted.clear()
        self.set_backward_passes_per_step(self.backward_passes_per_step)
        self._synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Let ``step`` use the current gradients, for example after ``synchronize`` and clipping."""
        if self._op == Adasum and self._group_of:
            raise AssertionError("skip_synchronize is not possible with Adasum, which combines changes of parameters")
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Reduce the gradients, and update the parameters. Collective over the process set.

        Args:
            closure: Computes the loss and the gradients; both are reduced after each call.
        """
        if self._op == Adasum and self._group_of:
            loss = None if closure is None else closure()
            self.synchronize()
            return loss
        if closure is not None:
            return super().step(self._synchronized_after(closure))
        if self._should_synchronize:
            if self._synchronized:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() after optimizer.synchronize(): "
                    "it reduces the gradients again",
                    stacklevel=2,
                )
            self.synchronize()
        self._synchronized = False
        return super().step()

    def _synchronized_after(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def evaluate() -> Any:
            loss = closure()
            if self._should_synchronize:
                self.synchronize()
            self._synchronized = False
            return self._mean(loss)

        return evaluate

    def _mean(self, loss: Any) -> Any:
        """Return the mean loss of the ranks, so that optimizers that use the loss have the same value on all ranks."""
        if not isinstance(loss, Tensor) or not self._group_of:
            return loss
        name = f"{next(iter(self._parameter_names.values()))}.loss"
        return allreduce_(loss.detach().clone(), name=name, process_set=self._process_set)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Reset the gradients. Local."""
        if self._submitted:
            raise AssertionError(
                "zero_grad() was called while the gradients are being reduced; call it after step() or synchronize()"
            )
        super().zero_grad(*args, **kwargs)

    def local_step(self) -> None:
        """Update the parameters with this rank's gradients. Local."""
        super().step()

    def load_state_dict(self, state_dict: Any) -> None:
        """Load the state of an optimizer of the same class. Local."""
        self._submitted.clear()
        self._synchronized, self._should_synchronize = False, True
        self.set_backward_passes_per_step(self.backward_passes_per_step)
        super().load_state_dict(state_dict)
