"""The hook interface of job files, and the view of the training loop that hooks get."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from ..core.layout import Array
from .progress import ConsistentPoint


class TrainingLoop(Protocol):
    """The training loop as seen by a hook. Attributes are read-only; shapes are in elements of the flat layout.

    Attributes:
        cluster: The ranks: ``cluster.chief`` is True on the worker that prints and writes files; ``cluster.workers`` is
            the workers' communicator.
        plan: How the job is trained: ``plan.layout`` has the names and ranges of the flat vectors,
            ``plan.step_examples`` is the number of examples per step, over all gradients that the step uses.
        step: Steps done; in the parameter-server modes by all workers combined.
        data_cursor: Examples that all workers combined have consumed from the stream of examples.
        train_steps: The step at which training ends.
        loss: Mean loss of the last step, as known to this worker; NaN before the first step.
        skipped: Whether the last gradient was discarded: too late, or the loss (or gradient in float16) was not finite.
        learning_rate: Learning rate of the last step.
        params: Shape (layout.size,): the parameters used by the model.
        grads: Shape (layout.size,): this worker's last gradient.
        validation: Metrics of the last validation, by name.
        validation_step: The step of the last validation; -1 if there was none since the run was started.
        measured_step: The number of steps of the parameters that it has measured: of a learner, the common ones.
        paused_s: Seconds of validation, saving and other hooks at consistent points since the beginning of training.
        training_s: Seconds since the beginning of training, without validation and saving.
        compute_s: Seconds that this worker has taken to load batches and to compute losses.
        waiting_s: Seconds that the workers have waited on average for slower ones, in ``training_s`` of the chief.
    """

    @property
    def cluster(self) -> Any: ...
    @property
    def plan(self) -> Any: ...
    @property
    def step(self) -> int: ...
    @property
    def data_cursor(self) -> int: ...
    @property
    def train_steps(self) -> int: ...
    @property
    def loss(self) -> float: ...
    @property
    def skipped(self) -> bool: ...
    @property
    def learning_rate(self) -> float: ...
    @property
    def params(self) -> Array: ...
    @property
    def grads(self) -> Array: ...
    @property
    def validation(self) -> Mapping[str, float]: ...
    @property
    def validation_step(self) -> int: ...
    @property
    def measured_step(self) -> int: ...
    @property
    def paused_s(self) -> Mapping[str, float]: ...
    @property
    def training_s(self) -> float: ...
    @property
    def compute_s(self) -> float: ...

    waiting_s: float

    def stop(self, reason: str = ...) -> None:
        """Finish training early; all workers stop soon. Local; one rank is enough.

        The run saves, ends with status 0 and state ``finished early``, and is not resumed by the same command.

        Args:
            reason: Shown to the user and recorded.
        """

    def request_pause(self, reason: str) -> None:
        """Request a ``ConsistentPoint`` as soon as possible. Local; no effect except on the chief.

        The last point includes the requests made after the last step. No point follows a request made at the last
        point.

        Args:
            reason: A name that ``ConsistentPoint.reasons`` includes at that point, on all workers.
        """

    def report(self, step: int, values: dict[str, float], show: bool = True, record: bool = True) -> None:
        """Print values of ``step``, and append them to ``metrics.jsonl``. Local; no effect except on the chief.

        Args:
            show, record: Whether to print the values, and whether to append them.
        """

    def add_validation(self, step: int, values: dict[str, float]) -> None:
        """Record validation metrics of ``step``, in addition to others of this step, and report them. Local."""


class Hook:
    """Base class of hooks; the training loop calls its methods on every worker.

    In ``sync`` and ``local``, all workers call a method at the same step, so it may communicate over
    ``loop.cluster.workers``. In ``async``, ``ssp`` and ``backup`` each worker runs at its own pace, so ``after_step``
    must not communicate. Only the chief should write files. Messages of Python's ``logging`` are printed by the chief.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs, such as the best loss; checkpoints contain the chief's state.

        Values are numbers, strings, and lists and dicts of these.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the chief's state. Called before ``begin`` on all workers of a resumed run, if it is not empty."""

    def begin(self, loop: TrainingLoop) -> None:
        """Called once on all workers, before the first step."""

    def after_step(self, loop: TrainingLoop) -> None:
        """Called after every step of this worker.

        ``loop.step`` counts the steps done, in the parameter-server modes by all workers combined; ``loop.loss`` is the
        mean loss of the last step.
        """

    def at_consistent_point(self, loop: TrainingLoop, point: ConsistentPoint) -> None:
        """Called on all workers while none computes and the trained model is complete; may communicate in every mode.

        Called at these points:

        - in ``sync`` after every step;
        - in ``local`` after each averaging;
        - in ``async``, ``ssp`` and ``backup`` whenever the workers pause, to validate, to save, or because a hook has
          called ``request_pause``;
        - in every mode at the end of training (``point.last``).
        """

    def end(self, loop: TrainingLoop) -> None:
        """Called once on all workers, after the last step; all have the same parameters."""
