"""The gradients of a step in a script's own loop: computed, averaged, used by the script, and applied."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from ..core.layout import Array, Layout
from ..core.ranges import announce_nothing
from ..errors import JobError
from ..models.accumulation import GradientAccumulation
from ..models.base import SteppedModel
from ..strategy.base import Part, Strategy
from .loop import BACKWARD


class ScriptStep:
    """The gradients of a step: computed and averaged by ``backward``, applied by ``update``.

    Gradients stay until they are applied, perhaps in a later step. A backward pass adds to gradients that are pending,
    as in PyTorch. In ``sync``, averages of earlier passes are then divided by the number of workers, because the next
    average adds up the gradients of all workers.

    Args:
        strategy: Averages the gradients and updates the parameters.
        model: Computes the gradients, in ``strategy.grads``.
        layout: The layout of ``strategy.grads``.
        workers: The number of workers.
        names: The names of the parameters that each optimizer updates; None for all.
        virtual: Adds up the gradients of the micro-batches if there are virtual workers, else None. Every micro-batch
            then has one backward pass: averages of several passes would depend on the number of workers.
    """

    def __init__(
        self,
        strategy: Strategy,
        model: SteppedModel,
        layout: Layout,
        workers: int,
        names: Sequence[Collection[str] | None],
        virtual: GradientAccumulation | None = None,
    ) -> None:
        self._strategy, self._names, self._virtual = strategy, names, virtual
        if virtual is not None and len(names) > 1:
            raise _not_with_virtual_workers(f"a Trainer with {len(names)} optimizers", "use one optimizer")
        self._model, self._workers = model, workers if strategy.sums_grads else 1
        shown = strategy.grads if strategy.shown_grads is None else strategy.shown_grads
        # State such as buffers, in the parameters, and its changes, in the gradient.
        params, grads = layout.views(strategy.params), layout.views(shown)
        names_of_state = [entry.name for entry in layout.entries if entry.kind == "state"]
        self._state: list[tuple[Array, Array]] = [(params[name], grads[name]) for name in names_of_state]
        # The optimizers with a gradient that no update has applied; the gradients of other optimizers begin at zero.
        self._pending: set[int] = set()
        self._is_local = False  # whether a pending gradient is not averaged
        self._has_added = False  # whether this micro-batch has had a backward pass, with virtual workers
        self._begin()
        if strategy.shown_grads is not None:
            model.show_grads_in(strategy.shown_grads, strategy.fetch_grads)

    def _begin(self) -> None:
        self._has_computed = self._has_updated = False  # whether this step has had a backward pass, and an update
        self._loss: Any = 0.0

    @property
    def has_gradient(self) -> bool:
        """Whether there is a gradient that no update has applied, to which the next backward pass adds."""
        return bool(self._pending) and self._virtual is None

    def can_update(self, optimizers: Sequence[int]) -> bool:
        """Whether this step has had a backward pass, and one of the given optimizers has a gradient to apply."""
        return self._has_computed and not self._pending.isdisjoint(optimizers)

    def backward(self, loss: Any, count: int, optimizers: Sequence[int], averages: bool, hides: bool) -> None:
        """Compute a gradient, and average it. Collective as ``Strategy.average`` if it averages; else local.

        Args:
            loss: The mean over a micro-batch.
            count: The number of examples in the micro-batch.
            optimizers: The indices of the optimizers whose parameters get the gradient.
            averages: Whether to average.
            hides: Whether the script must not see the gradient, because it is that of a part of a batch.
        """
        if self._virtual is not None:
            self._add_micro_batch(self._virtual, loss, count, averages or hides)
            return
        strategy, model, kept = self._strategy, self._model, None
        if self._pending:
            model.collect_grads(strategy.fetch_grads)
            kept = 1 / self._workers if averages else 1.0
        strategy.begin_backward(kept, averages)
        if self._pending:
            model.load_grads()
        earlier = model.add_loss(0.0, self._loss) if self._has_computed else None  # a copy, which stays valid
        self._loss = model.end_forward(loss, count, 1.0 if averages else self._workers)
        if earlier is not None:
            self._loss = model.add_loss(earlier, self._loss)
        if averages:
            strategy.begin(self._loss)  # a loss that is not finite is known before any update
        on_ready = strategy.ready if averages and strategy.averages_grads else announce_nothing
        with BACKWARD:
            model.backward(on_ready, self._names_of(self._pending), self._names_of(optimizers))
            on_ready(0)
        self._pending.update(optimizers)
        self._has_computed, self._is_local = True, not averages
        if averages:
            strategy.average()
        if hides:
            model.hide_grads()
        else:
            self._show()

    def _add_micro_batch(self, virtual: GradientAccumulation, loss: Any, count: int, averages: bool) -> None:
        """Add the gradient of a micro-batch; after the last one of a step, average."""
        strategy, model = self._strategy, self._model
        if not averages:
            raise _not_with_virtual_workers("trainer.no_sync", "remove it")
        if not virtual.has_begun:
            if self._pending:
                raise _not_with_virtual_workers(
                    "a second backward pass without a step", "call step after each backward"
                )
            strategy.begin_backward(None, averages=True)
        elif self._has_added:
            raise _not_with_virtual_workers("a second backward pass for a batch", "add up the losses")
        self._has_added, self._has_computed = True, True
        self._pending.add(0)
        total = virtual.add(model.end_forward(loss, count))
        if total is None:
            model.hide_grads()
            return
        self._loss = total
        strategy.begin(total)  # a loss that is not finite is known before any update
        with BACKWARD:
            virtual.backward(strategy.ready)
        strategy.average()
        self._show()

    def _show(self) -> None:
        """Show the gradient to the script, if it sees copies."""
        if self._model.copies_grads and self._strategy.averages_grads:
            self._strategy.fetch_grads()
            self._model.show_grads()

    def _average_local(self) -> None:
        """Average the gradients of passes that have not averaged."""
        if self._is_local:
            self._model.collect_grads(self._strategy.fetch_grads)
            self._strategy.begin_backward(1 / self._workers, averages=True)
            self._strategy.begin(self._loss)
            if self._strategy.averages_grads:
                self._strategy.ready(0)
            self._strategy.average()
            self._is_local = False
            self._show()

    def update(self, optimizers: Sequence[int]) -> None:
        """Update with those ``optimizers`` that have a gradient. Collective as ``Strategy.update``."""
        self._average_local()
        self._model.collect_grads(self._strategy.fetch_grads)
        self._model.note_frozen()
        indices = self._pending.intersection(optimizers)
        names = self._names_of(indices)
        self._strategy.update(None if names is None else Part(sum(1 << index for index in indices), names))
        if names is not None:  # otherwise the step ends
            self._model.mark_updated(names)
            for _, increment in self._state:  # applied, too
                increment[...] = 0
        self._has_updated = True
        self._pending -= indices

    def begin_micro_batch(self) -> None:
        """Prepare for a forward pass on a new micro-batch. Local."""
        self._has_added = False

    def begin_batch(self) -> None:
        """Prepare for a forward pass on a new batch. Local."""
        if not self._pending:
            self._strategy.begin_batch()
            self._model.hide_grads()

    def change_params(self, change: Callable[[], object]) -> None:
        """Call a function that applies the gradients; see ``Strategy.change_params``."""
        self._average_local()
        strategy, has_increments = self._strategy, self._has_computed and bool(self._pending)

        def change_and_store() -> None:
            change()
            self._model.store_params()
            if has_increments:
                strategy.fetch_grads()
                for value, increment in self._state:
                    value += increment

        strategy.change_params(change_and_store)
        self._model.mark_updated(None)
        self._pending.clear()

    def end(self) -> None:
        """End the step. Collective as ``Strategy.end_step``."""
        if self._is_local:
            self._strategy.begin(self._loss)
        if not self._strategy.averages_grads:
            self._strategy.ready(0)
        self._strategy.end_step(self._has_updated, complete=not self._pending)
        self._begin()

    def _names_of(self, optimizers: Iterable[int]) -> Collection[str] | None:
        """Return the names of the parameters that these optimizers update; None for all parameters of the model."""
        parts = [self._names[index] for index in optimizers]
        return None if None in parts else [name for names in parts for name in names or ()]


def _not_with_virtual_workers(what: str, fix: str) -> JobError:
    return JobError(
        f"{what} does not work with --virtual-workers, because its result would depend on the number of workers: "
        f"{fix}, or remove --virtual-workers",
        on_all_ranks=True,
    )
