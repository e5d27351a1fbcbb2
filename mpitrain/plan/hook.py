"""What a job file may add to the training loop: hooks, and what they see of the loop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from ..core.layout import Array, Layout


class TrainingLoop(Protocol):
    """What a hook may use of the training loop. Attributes are read-only; shapes are in elements of the flat layout.

    Attributes:
        cluster: The ranks: ``cluster.chief`` is True on the worker that prints and writes files; ``cluster.workers`` is
            the workers' communicator.
        step: Steps done; in the served modes by all workers together.
        data_cursor: Examples that all workers together have taken from the stream of examples.
        train_steps: The step at which training ends.
        step_examples: Examples of one step, over all gradients that it takes.
        loss: Mean loss of the last step, as far as this worker knows it; NaN before the first step.
        skipped: Whether the last gradient was not applied (its loss was not finite, or it came too late).
        learning_rate: Learning rate of the last step.
        layout: Names and ranges of the flat vectors.
        params: Shape (layout.size,): the parameters that the model computes with.
        grads: Shape (layout.size,): this worker's last gradient.
        validation: Values of the last validation, by name.
    """

    @property
    def cluster(self) -> Any: ...
    @property
    def step(self) -> int: ...
    @property
    def data_cursor(self) -> int: ...
    @property
    def train_steps(self) -> int: ...
    @property
    def step_examples(self) -> int: ...
    @property
    def loss(self) -> float: ...
    @property
    def skipped(self) -> bool: ...
    @property
    def learning_rate(self) -> float: ...
    @property
    def layout(self) -> Layout: ...
    @property
    def params(self) -> Array: ...
    @property
    def grads(self) -> Array: ...
    @property
    def validation(self) -> Mapping[str, float]: ...

    # What the built-in hooks use besides.

    @property
    def plan(self) -> Any: ...
    @property
    def saving(self) -> Any: ...
    @property
    def saved(self) -> bool: ...
    @property
    def training_s(self) -> float: ...
    @property
    def lockstep(self) -> bool: ...
    @property
    def settled(self) -> bool: ...
    @property
    def paused(self) -> bool: ...
    def pause_at(self, step: int) -> None: ...
    def pause_soon(self) -> None: ...
    def totals(self) -> Any: ...
    def validate_now(self) -> None: ...
    def report_validation(self) -> None: ...
    def validate_at_end(self) -> None: ...

    def stop(self) -> None:
        """Ask all workers to stop soon. Local; enough on one rank."""

    def report(self, step: int, values: dict[str, float]) -> None:
        """Print values measured at ``step``; add them to ``metrics.jsonl``. Local; only the chief's call counts."""

    def say(self, line: str) -> None:
        """Print a line. Local; only the chief's call counts."""


class Hook:
    """Called by the training loop on every worker.

    In ``sync`` and ``local`` all workers are at the same step then, so a method may communicate over
    ``loop.cluster.workers``. In ``async``, ``ssp`` and ``backup`` each worker comes at its own pace, and
    ``after_step`` must not communicate. Only the chief should print or write files.
    """

    def begin(self, loop: TrainingLoop) -> None:
        """Called once, before the first step; all workers are there."""

    def after_step(self, loop: TrainingLoop) -> None:
        """Called after every step of this worker, with ``loop.step`` steps done, by all workers together in the modes
        without a common pace, and ``loop.loss`` the last one's mean loss."""

    def end(self, loop: TrainingLoop) -> None:
        """Called once, after the last step; all workers are there, and have the same parameters."""
