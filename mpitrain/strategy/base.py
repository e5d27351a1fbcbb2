"""The interface between the training loop and every mode: work items, consistent points, parameters and gradients."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple, SupportsFloat

from ..checkpoint.snapshot import Snapshot
from ..comm.mpi import MPI
from ..core.extra_state import ExtraState
from ..core.layout import Array
from ..errors import JobError
from ..monitor.worker_stats import GradientBytes, WorkerStats
from ..optim import Optimizer
from ..plan.plan import Plan
from ..plan.progress import ConsistentPoint, Progress, WorkItem


class StepResult(NamedTuple):
    """The result of a step for this worker.

    Attributes:
        loss: Mean loss over the step's examples, as known to this worker.
        updated: False if the gradient was discarded: the loss or a float16 gradient was not finite, or the gradient
            came too late.
    """

    loss: float
    updated: bool


class PauseRequests:
    """The consistent points that the chief has requested and that were not reached yet.

    Args:
        workers: The communicator of the workers; the chief is its first rank.
    """

    def __init__(self, workers: MPI.Intracomm) -> None:
        self._workers = workers
        self._reasons: set[str] = set()

    def __bool__(self) -> bool:
        """Return whether this worker has requested a point that was not reached yet. Local."""
        return bool(self._reasons)

    def add(self, reason: str) -> None:
        """Request a point. Local; chief only."""
        self._reasons.add(reason)

    def take(self) -> frozenset[str]:
        """Return the reasons for the point that all workers have reached. Collective over the workers."""
        reasons = frozenset(self._reasons)
        self._reasons.clear()
        return self._workers.bcast(reasons, root=0)  # type: ignore[no-any-return]


class Stats(NamedTuple):
    """Totals over all workers since this run began.

    Attributes:
        step: Number of completed steps; unlike the totals, it includes the steps before a resume.
        loss: Sum of the losses of the steps that were not skipped.
        steps: Number of steps in that sum.
        skipped: Number of steps skipped because their loss, or a float16 gradient, was not finite.
        workers: Statistics of each worker; empty if all workers take the same steps.
        internode_bytes: Bytes that all workers have sent to other nodes, if the mode counts them.
        saved_bytes: Additional bytes that the workers would have sent without compression.
        gradient_nbytes: Number of bytes of a submitted gradient, by worker and server; empty if it has the size of all
            parameters.
        grad_norm: The norm of the averaged gradient, before clipping, in the last step that measured the norm. None if
            no step measured it, or if that step made no update.
        moved: Number of steps by which ``step`` has grown because other learners have trained.
    """

    step: int
    loss: float
    steps: int
    skipped: int
    workers: list[WorkerStats]
    internode_bytes: int = 0
    saved_bytes: int = 0
    gradient_nbytes: GradientBytes = ()
    grad_norm: float | None = None
    moved: int = 0


class Part(NamedTuple):
    """Some of the parameters.

    Attributes:
        number: Identifies the part; below 2**52.
        names: The names of the parameters.
    """

    number: int
    names: Collection[str]


class SharedVectors(NamedTuple):
    """Vectors in memory that several ranks share.

    Attributes:
        comm: The communicator of the ranks; its first rank has the vectors as its ``initial_vectors``.
        vectors: The vectors by name, in the same memory on all these ranks.
    """

    comm: MPI.Intracomm
    vectors: dict[str, Array]


class Strategy(ABC):
    """Turns this worker's gradient of a step into the parameters of the next step.

    The constructor ``(cluster, plan, devices, state)`` allocates memory. Then the caller fills ``initial_vectors`` on
    every rank that has them, with initial values or those of a checkpoint. Then ``start`` begins training. All three
    actions are collective over the workers, and over all ranks in the modes with parameter servers.
    ``bulk_synchronous.BulkSynchronous`` is a base class for modes in which all workers take the same steps.

    ``next`` returns a work item. A job's loop then calls, in this order:

    - ``begin``, when the loss is known;
    - ``ready``, whenever a part of the gradient is final, during the backward pass;
    - ``average``, ``update`` and ``end_step``, once each.

    In a script's own loop, every backward pass calls ``begin_backward``. A pass whose gradient is averaged also calls
    ``begin``, ``ready`` and ``average``. Then ``update`` follows, perhaps several times or not at all. ``end_step``
    ends the step; if the last pass has not averaged, ``begin`` is called before it.

    A strategy either submits the gradient as a whole, in ``finish``, or overrides ``average``, ``update`` and
    ``end_step``. These four methods are collective over the workers if all of them take the same steps, else local.

    Attributes:
        synchronous: Whether all workers take the same steps, each with its own batch.
        plan: The plan of the run.
        params: Shape (layout.size,): the parameters that the model computes with; read-only. On the worker's device or
            in host memory.
        grads: Shape (layout.size,): written by the model's backward pass; in the same kind of memory as ``params``.
        sums: The sums of micro-batches that are added up separately (``plan.progress.Share.additions``). The last one
            is the memory of ``grads``, and the only one if this is empty. The others are written before the last
            backward pass.
        initial_vectors: ``plan.vectors`` by name, shape (layout.size,) each, in host memory; None on ranks
            that share another rank's vectors.
        progress: The progress of training.
        last_result: The result of the last step whose result is known; ``result`` returns it.
        shared_vectors: The memory of ``initial_vectors`` on all ranks that share it, which can then fill it together.
        has_ended: Whether no step follows; the same on all workers after a step that all of them take.
        averages_grads: Whether ``average`` may change ``grads``, and ``ready`` may be called during each backward pass
            of a script.
        sums_grads: Whether ``average`` adds up the gradients of all workers, which are weighted by ``plan.weight``.
        has_slots: Whether ``set_slots`` and ``rule_step`` work, and ``vector`` returns slots in host memory.
        shown_grads: Shape (layout.size,): the gradient that a script sees, once ``fetch_grads`` was called; None if it
            is ``grads``.
        updates_whole_tensors: Whether the strategy can update with a ``WholeTensorOptimizer``.
        shares_params: Whether other ranks use the same copy of the parameters, so that a script must not change it.
        has_virtual_workers: Whether gradients are added up as virtual workers need it (``comm.sum_order``).
        sums_losses: Whether ``sums`` have one more element at the end, in which losses are added up like gradients.
        compresses_grads: Whether ``average`` compresses gradients as ``--compress`` requests.
    """

    has_ended = False
    averages_grads = sums_grads = has_slots = updates_whole_tensors = shares_params = compresses_grads = False
    has_virtual_workers = sums_losses = False
    synchronous: bool
    plan: Plan
    params: Array
    grads: Array
    sums: Sequence[Array] = ()
    initial_vectors: dict[str, Array] | None
    progress: Progress
    last_result = StepResult(math.nan, True)
    shared_vectors: SharedVectors | None = None
    shown_grads: Array | None = None

    @abstractmethod
    def start(self, progress: Progress, extra_state: ExtraState) -> None:
        """Begin to train from ``initial_vectors``, which have been filled.

        Args:
            progress: The progress of training to which the vectors belong.
            extra_state: The extra state of the resumed run, whose precision or mode may differ; empty if no run is
                resumed.
        """

    @property
    def result(self) -> StepResult:
        """The result of the last step; waits for it if it is still being computed. Local."""
        return self.last_result

    @property
    def waited_s(self) -> float:
        """Seconds that this worker has waited in steps for other workers, as far as this is measured. Local."""
        return 0.0

    @abstractmethod
    def next(self) -> WorkItem | ConsistentPoint | None:
        """Return the next action; None at the end, after the last ``ConsistentPoint``. May wait for other workers."""

    @abstractmethod
    def begin(self, loss: SupportsFloat) -> None:
        """Set this worker's share of the step's loss, as the model's ``forward`` returns it. Local."""

    def ready(self, start: int) -> None:
        """Declare ``grads[start:]`` final; called with decreasing ``start``, finally 0.

        Local, or collective over the node if all workers take the same steps.

        The strategy may change parameters from now on, but only after it has checked the loss as ``--nan`` requires.

        Raises:
            NonFiniteLoss: The loss is not finite and ``--nan`` is ``stop``; raised here or in a later call.
        """

    def average(self) -> None:
        """Replace ``grads`` with the gradient that ``update`` applies; in ``sync``, the sum over all workers."""

    def update(self, part: Part | None = None) -> None:
        """Update the parameters with ``grads``, unless ``average`` has seen a loss that ``--nan`` does not accept.

        Args:
            part: The parameters to update, with a ``WholeTensorOptimizer``; None for all parameters.
        """

    def end_step(self, updated: bool, complete: bool) -> None:
        """End the step.

        Args:
            updated: Whether ``update`` was called.
            complete: Whether no gradient is left for a later step; checkpoints do not contain such gradients.

        Raises:
            JobError: The mode needs an update in each step.
        """
        if not (updated and complete):
            raise JobError("this mode needs an update in each step: call trainer.step() for every batch")
        self.finish()

    def finish(self) -> None:
        """Submit the gradient as a whole; called by the ``end_step`` of this class."""
        raise NotImplementedError

    def late_params(self) -> Callable[[int], None] | None:
        """Let ``end_step`` return before all parameters have arrived from other nodes, if the strategy can do so.

        Called by all workers; collective over the node.

        Returns:
            A function of ``stop`` that waits until ``params[:stop]`` are complete, collective over the node; None if
            ``end_step`` always waits.
        """
        return None

    @abstractmethod
    def request_pause(self, reason: str) -> None:
        """Request a ``ConsistentPoint`` as soon as possible; its ``reasons`` include this one. Local; chief only."""

    @abstractmethod
    def request_stop(self) -> None:
        """Request that all workers stop soon. Local; one rank is enough."""

    @abstractmethod
    def vector(self, name: str) -> Array:
        """Return one of ``plan.vectors``, complete, on the device of ``params``; valid until the next call or step.

        Collective over the workers, at a ``ConsistentPoint``.
        """

    @abstractmethod
    def snapshot(self) -> Snapshot:
        """Return the state for a checkpoint. Collective over the workers, at a ``ConsistentPoint``.

        The vectors are complete on the ranks that write: the chief and, if all workers take the same steps, the first
        rank of each node. The strategy changes none of them before ``Snapshot.release`` is called.
        """

    def extra_state(self) -> ExtraState:
        """Return state of the mode that is not in the vectors. Collective like ``snapshot``.

        ``snapshot`` includes the state, and ``start`` restores it.
        """
        return {}

    @abstractmethod
    def stats(self) -> Stats:
        """Return the totals of all workers; on the chief. Local."""

    def memory_use(self) -> dict[str, int]:
        """Return bytes of device memory by purpose; empty if the strategy uses no device memory. Local."""
        return {}

    @abstractmethod
    def close(self) -> None:
        """Free memory. Collective over the ranks that constructed it."""

    # For scripts.

    def begin_batch(self) -> None:
        """Declare that the script will not see the last gradient any more, which was applied. Local."""

    def begin_backward(self, kept: float | None, averages: bool) -> None:
        """Prepare ``grads`` for a backward pass. Collective over the node if all workers take the same steps.

        Args:
            kept: The factor of the gradient that the script sees, to which the pass adds; None if it begins at zero.
            averages: Whether ``average`` follows; otherwise the script sees this worker's own gradient.
        """
        if kept is not None and kept != 1:
            trained = self.grads[: self.plan.layout.n_trained]  # state is weighted by each worker's share already
            trained *= trained.dtype.type(kept)

    def fetch_grads(self) -> None:
        """Write the gradient to ``shown_grads``, before a script uses it. Local."""

    def change_params(self, change: Callable[[], object]) -> None:
        """Call a function that changes the parameters, once for each copy of them. Collective over the workers."""
        raise JobError("trainer.change_parameters needs --mode sync or local on CPUs")

    def set_params(self, parts: Sequence[tuple[int, Array]]) -> None:
        """Replace parts of the parameters, between two steps. Collective over the workers.

        Args:
            parts: The first element of each part, and its values, in host memory or in that of ``params``.
        """

        def change() -> None:
            for start, values in parts:
                self.params[start : start + len(values)] = values

        self.change_params(change)

    def set_optimizer(self, optimizer: Optimizer) -> None:
        """Update with this optimizer, which has other options but the same slots, from now on. Local."""
        raise JobError(
            "an option of the optimizer other than the learning rate was changed, which needs --mode sync or local on "
            "CPUs; for OneCycleLR and CyclicLR pass cycle_momentum=False"
        )

    def set_slots(self, slots: Mapping[str, Array], updates: int) -> None:
        """Set the optimizer's slots, between two steps, if ``has_slots``. Collective over the workers.

        Args:
            slots: By name, shape (layout.size,) each; the same on all workers in ``sync``.
            updates: The number of updates that produced the slots.
        """
        raise NotImplementedError

    @property
    def rule_step(self) -> int:
        """The number of updates, including the ``updates`` given to ``set_slots``; if ``has_slots``. Local."""
        raise NotImplementedError
