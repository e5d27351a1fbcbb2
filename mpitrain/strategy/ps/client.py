"""The worker's side of modes with servers: ``async``, ``ssp`` and ``backup``.

A worker takes a work item, reads the newest parameters, computes a gradient, and submits it. How gradients
become steps depends on the mode: see ``asynchronous`` and ``backup``.
"""

from __future__ import annotations

import logging
import math
from typing import Any, SupportsFloat

import numpy as np

from ...checkpoint.snapshot import Snapshot
from ...core.extra_state import ExtraState, Value, Versioned, values_of
from ...core.layout import Array
from ...core.training_state import TrainingState
from ...monitor.trace import span
from ...plan.progress import ConsistentPoint, Progress, WorkItem
from ..base import PauseRequests, Stats, Strategy
from ..non_finite import NonFinitePolicy
from .coordinator import END, PAUSE, WAIT, Assignment
from .remote import PrefetchingShard, RemoteShard
from .store import ParameterStore

_log = logging.getLogger(__name__)

_NAMESPACE = "unsent gradients"  # namespace of the extra state


class PsStrategy(Strategy):
    """The common part of the modes with servers; see ``base.Strategy`` for the methods.

    All methods are local, except ``start``, ``next`` before and after a ``ConsistentPoint``, ``snapshot``,
    ``extra_state`` and ``close``. ``finish`` may wait for other workers.

    A subclass implements ``finish``, which takes the loss with ``take_loss``, calls ``advance_to``, and sets
    ``last_result``. It may override ``allocate``, ``least_version``, ``read_params``, ``vector`` and ``unsent``.

    Args:
        store: The parameters; started and freed with this object.

    Attributes:
        store: The parameters.
        worker: The index of this worker.
        shards: All shards, by number; ``versions`` are the versions of the parameters that were read last.
        shard_order: The numbers of the shards in the order in which this worker sends requests.
        coordinator: Assigns work items and counts steps.
        non_finite: The policy for losses that are not finite.
        item, work, lead: The number of the current work item, its step and its examples, and the number of steps that
            this worker is ahead of the slowest worker.
    """

    synchronous = False

    def __init__(self, store: ParameterStore, state: TrainingState) -> None:
        self.store, plan, cluster = store, store.plan, store.cluster
        self.plan, self.worker, self._chief = plan, cluster.task_index, cluster.chief
        self.initial_vectors, self.shared_vectors = store.initial_vectors, store.shared_vectors
        self.progress = Progress(0, 0)
        self.non_finite = NonFinitePolicy(plan.config.training.nan, plan.workers)
        # ``_frozen`` has the values that the shards have.
        self._training_state, self._frozen = state, state.frozen.tobytes()
        self._live_rates = plan.optimizer.live_rates if self._chief else []
        self._rates = [math.nan] * len(self._live_rates)  # the rates that the servers have
        self.params, self.grads = self.allocate()
        self.shards = store.shard_clients(self.params)
        remote = [s for s, shard in enumerate(self.shards) if isinstance(shard, RemoteShard)]
        local = [s for s in range(len(self.shards)) if s not in remote]
        self._remote_shards = [shard for shard in self.shards if isinstance(shard, RemoteShard)]
        self._prefetching_shards = [shard for shard in self._remote_shards if isinstance(shard, PrefetchingShard)]
        # Requests to other nodes are sent first. Workers begin at different shards of their node, so that they do not
        # all wait for the same one.
        first = self.worker % max(1, len(local))
        self.shard_order = remote + local[first:] + local[:first]
        self.coordinator = store.step_coordinator(self.shards)
        self._gradient_nbytes = store.gradient_nbytes()
        self._pauses = PauseRequests(cluster.workers)
        self.versions = [0] * len(self.shards)
        self._micro_batches = plan.share_of(self.worker).micro_batches
        self.item, self.lead, self.work = 0, 0, WorkItem(0, 0, self._micro_batches)
        self._loss: Any = math.nan
        self._paused, self.has_ended = True, False  # at the start, workers wait for each other, as after a pause
        self.n_reads = 0  # number of reads not yet reported

    def start(self, progress: Progress, extra_state: ExtraState) -> None:
        self.store.start(progress)
        self._load_unsent(extra_state)
        self.progress = self._began = progress

    def allocate(self) -> tuple[Array, Array]:
        """Return memory for this worker's parameters and gradient."""
        return self.store.allocate_params(), np.zeros(self.plan.layout.size, self.plan.dtype)

    # Work items.

    @span("wait")
    def next(self) -> WorkItem | ConsistentPoint | None:
        if self._paused:
            self._leave_point()
        if self.has_ended:
            return None
        item, step, self.lead = self._await_assignment()
        if item in (PAUSE, END):
            self.has_ended = item == END
            return self._pause()
        self.item, self.work = item, WorkItem(step, self._cursor_of(item), self._micro_batches)
        self.read_params(step)
        return self.work

    def _await_assignment(self) -> Assignment:
        """Return a work item, a pause, or the end; wait until there is one of them."""
        assignment = Assignment(WAIT, 0, 0)

        def is_assigned(spins: int) -> bool:
            nonlocal assignment
            assignment = self.coordinator.next(self.worker)
            return assignment.item != WAIT

        self.store.waiting.until(is_assigned)
        return assignment

    def _pause(self) -> ConsistentPoint:
        """Wait until all workers pause, and read the parameters. Collective over the workers."""
        self._await_workers()
        self._paused = True
        self.store.waiting.until(self._complete)  # a server may not have counted the last step yet
        state = self._coordinator_state
        self.progress = Progress(state.done, self._cursor_of(state.items))
        self.read_params(state.done)
        return ConsistentPoint(*self.progress, self._pauses.take(), self.has_ended)

    def _complete(self, spins: int) -> bool:
        """Return whether all begun steps are applied; store the coordinator's state."""
        state = self._coordinator_state = self.coordinator.state()
        return state.done == state.begun

    def _leave_point(self) -> None:
        """Continue when no worker needs the parameters of the point any longer. Collective over the workers."""
        self._await_workers()
        self._paused = False
        if self._chief and not self.has_ended:
            step = self.progress.step  # a hook may have requested another point at this one
            self.coordinator.set_pause_step(step + 1 if self._pauses else self.plan.next_pause(step))

    def _await_workers(self) -> None:
        barrier = self.store.cluster.workers.Ibarrier()
        self.store.waiting.until(lambda spins: barrier.Test())

    def request_pause(self, reason: str) -> None:
        self._pauses.add(reason)
        self.coordinator.request_pause()

    def request_stop(self) -> None:
        self.coordinator.stop()

    def _cursor_of(self, item: int) -> int:
        """Return the index of the first example of a work item."""
        return self._began.data_cursor + (item - self._began.step) * self.plan.batch

    # Parameters.

    def least_version(self, step: int) -> int:
        """Return the version that every shard must have before this worker reads parameters for ``step``."""
        return 0

    @span("pull")
    def read_params(self, step: int) -> None:
        """Read the newest parameters of every shard, or the prefetched ones; prefetch those of the next step."""
        self.n_reads += 1
        least = self.least_version(step)
        if self._paused:  # all steps are complete, and prefetched parameters may be older
            for shard in self._prefetching_shards:
                shard.discard()
        reads = {s: self.shards[s].read(least) for s in self.shard_order}
        for s, wait in reads.items():
            self.versions[s] = wait()
        if not self._paused:
            for shard in self._prefetching_shards:
                shard.prefetch()

    def vector(self, name: str) -> Array:
        """Return one of the vectors; ``next`` has read ``params``."""
        if name == "params":
            return self.params
        vector, params = np.zeros_like(self.params), self.params.copy()  # replies overwrite ``self.params``
        for shard in self.shards:
            shard.read_vector(name, vector)
        self.params[:] = params
        return vector

    def snapshot(self) -> Snapshot:
        names = self.plan.vectors if self._chief else []
        vectors = {name: self.vector(name) for name in names}
        if "params" in vectors:
            vectors["params"] = self.params.copy()
        return Snapshot(vectors, *self.progress, self.extra_state(), private=True)

    def extra_state(self) -> ExtraState:
        """Return state of the mode that is not in the vectors; ``start`` restores it. Collective over the workers.

        This state is the sum over the workers of each vector in ``unsent``.
        """
        values: dict[str, Value] = {}
        for name, own in self.unsent().items():
            total = np.zeros_like(self.params)
            self.store.cluster.workers.Reduce(own if len(own) else np.zeros_like(total), total)
            values[name] = total
        return {_NAMESPACE: Versioned(1, values)} if values and self._chief else {}

    def unsent(self) -> dict[str, Array]:
        """Return the parts of this worker's vectors that compression has not sent; the same names on all workers.
        Local.

        An array is empty if this worker sends nothing to other nodes.
        """
        has_channel = self.store.requests.client is not None
        return {"residual": self.store.residual} if has_channel and self.plan.config.compression is not None else {}

    def _load_unsent(self, state: ExtraState) -> None:
        """Divide the values not sent to a server among the workers that send gradients to this server. Local."""
        values, vectors = values_of(state, _NAMESPACE, 1), self.unsent()
        for name in values.keys() - vectors.keys():
            namespace = f"{_NAMESPACE}/{name}"
            _log.info("the checkpoint has the state %r, which this run does not use: it is dropped", namespace)
        for name, own in vectors.items():
            if len(own) and name in values:
                total = np.asarray(values[name])
                for lo, hi, workers in self.store.senders():
                    own[lo:hi] = total[lo:hi] / workers

    # Gradients.

    def begin(self, loss: SupportsFloat) -> None:
        self._loss = loss
        frozen = self._training_state.frozen
        if (flags := frozen.tobytes()) != self._frozen:
            self._frozen = flags
            for shard in self.shards:
                shard.freeze(frozen)
        for index, live in enumerate(self._live_rates):
            if (rate := live.as_set()) != self._rates[index]:
                self.store.memory.rates[index] = self._rates[index] = rate
                for shard in self._remote_shards:
                    shard.set_rate(index, rate)

    def take_loss(self) -> float:
        """Return this worker's share of the loss; waits for it on a GPU.

        Raises:
            NonFiniteLoss: The loss is not finite and ``--nan`` is ``stop``.
        """
        loss = self._loss = float(self._loss)
        self.non_finite.check_own(loss, self.worker, self.work.step)
        return loss

    def advance_to(self, step: int) -> None:
        self.progress = Progress(step, self.progress.data_cursor)

    def take_reads(self) -> int:
        """Return the number of reads since the last call."""
        reads, self.n_reads = self.n_reads, 0
        return reads

    def stats(self) -> Stats:
        state = self.coordinator.state()
        steps = state.done - self._began.step - state.skipped
        sizes = self._gradient_nbytes
        return Stats(state.done, state.loss, steps, state.skipped, state.worker_stats, gradient_nbytes=sizes)

    def close(self) -> None:
        self.store.free()
