"""The worker's side of ``--mode async``, ``ssp`` and ``backup``, with parameters on servers.

A worker takes a work item, reads the newest parameters, computes a gradient, and submits it. In ``Async`` every shard
applies each gradient on arrival; ``BackupWithServers`` collects the first gradients of a step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from ...core.layout import Array
from ..base import StepResult, Totals, Turn, WorkItem, Wrap, non_finite_error
from .coordinator import END, PAUSE, WAIT, CoordinatorState
from .remote import RemoteCoordinator, RemoteShard
from .shard import Shard
from .store import Store


class PsStrategy:
    """The common part of the modes; see ``base.Strategy`` for the methods.

    Local, except ``close`` and ``free``.

    Args:
        store: The parameters; freed with this object.
    """

    lockstep = False
    settled = True
    paused = False
    on_device = False
    loss_scale: Array | None = None

    def __init__(self, store: Store) -> None:
        plan, cluster = store.plan, store.cluster
        self._store, self._plan, self._worker, self._chief = store, plan, cluster.task_index, cluster.chief
        self._nan = plan.config.nan
        self.vectors, self.has_average = plan.vectors, plan.moving_average is not None
        self.step, self.data_cursor = store.step, store.data_cursor
        self._begin_step, self._begin_cursor = store.step, store.data_cursor
        self.params, self.grads = self._memory()
        self._local: list[tuple[int, Shard]] = sorted(store.shards.items())
        rpc = store.rpc
        self._remote: list[tuple[int, RemoteShard]] = []
        if rpc is not None:
            self._remote = [(s, RemoteShard(rpc, store.holders[s], plan.vectors)) for s in store.remote]
        self._coordinator = store.coordinator
        self._remote_coordinator = None
        if self._coordinator is None:
            assert rpc is not None
            self._remote_coordinator = RemoteCoordinator(rpc, store.holders[0])
        self._versions = [0] * len(store.holders)
        self._item, self._work = 0, WorkItem(0, 0)
        self._step_loss = 0.0
        self.result = StepResult(math.nan, True)
        self._reads = 0  # not yet reported

    @property
    def extra_state(self) -> Mapping[str, float]:
        return {}

    def _memory(self) -> tuple[Array, Array]:
        """Return this worker's parameters and gradient; the RPC transport's vector if parameters arrive there."""
        size, dtype, rpc = self._plan.layout.size, self._plan.dtype, self._store.rpc
        arrives = rpc is not None and len(rpc.vector) == size
        params = rpc.vector if rpc is not None and arrives else np.zeros(size, dtype)
        return params, np.zeros(size, dtype)

    # Work items.

    def pause_at(self, step: int) -> None:
        if not self._chief:
            return
        if self._coordinator is not None:
            self._coordinator.set_pause_step(step)
        elif self._remote_coordinator is not None:
            self._remote_coordinator.set_pause_step(step)

    def pause_soon(self) -> None:
        self.pause_at(self.step)

    def next(self) -> WorkItem | Turn:
        item, step, ahead = self._next_item()
        if item == END:
            return Turn.END
        if item == PAUSE:
            self._arrive()
            self._read(self._least_version(self.step))  # waits until every shard has reached the step
            return Turn.PAUSE
        self._item, self._ahead = item, ahead
        self._work = WorkItem(step, self._cursor_of(item))
        self._read(step)
        return self._work

    def _next_item(self) -> tuple[int, int, int]:
        if self._remote_coordinator is not None:
            return self._remote_coordinator.next()
        item = (WAIT, 0, 0)

        def try_to() -> bool:
            nonlocal item
            assert self._coordinator is not None
            item = self._coordinator.next(self._worker, self._chief)
            return item[0] != WAIT

        self._store.waiting.until(lambda spins: try_to())
        return item

    def _arrive(self) -> None:
        """Set the step and data cursor when all workers are paused."""
        state = self.state()

        def still() -> bool:
            nonlocal state
            state = self.state()
            return state.done == state.begun

        if state.done != state.begun:  # a server has not yet counted the last step
            self._store.waiting.until(lambda spins: still())
        self.step, self.data_cursor = state.done, self._cursor_of(state.items)

    def _cursor_of(self, item: int) -> int:
        """Return the index of the first example of a work item."""
        first = 0 if self._plan.config.mode == "backup" else self._begin_step
        return self._begin_cursor + (item - first) * self._plan.batch

    def state(self) -> CoordinatorState:
        """Return the progress of training, and the statistics of each worker since this run began."""
        if self._coordinator is not None:
            return self._coordinator.state()
        assert self._remote_coordinator is not None
        return self._remote_coordinator.state()

    def stop(self) -> None:
        (self._coordinator or self._remote_coordinator).stop()  # type: ignore[union-attr]

    # Parameters.

    def _least_version(self, step: int) -> int:
        """Return the lowest version of the parameters that is valid for a step."""
        return 0

    def _read(self, step: int) -> None:
        """Read the newest parameters."""
        self._reads += 1
        least = self._least_version(step)
        for _, far in self._remote:
            far.post_read(least)
        for s, shard in self._local:
            self._store.waiting.until(lambda spins, shard=shard: shard.version >= least)  # type: ignore[misc]
            self._versions[s] = shard.read(self.params)
        for s, far in self._remote:
            self._versions[s] = far.wait_read()

    def on_device_copy(self, name: str) -> Array:
        return self.gather(name)

    def gather(self, name: str) -> Array:
        """Return one of the vectors as it is now; ``params`` also updates this worker's parameters."""
        if name == "params":
            self._read(0)
            return self.params
        found = np.zeros_like(self.params)
        for _, shard in self._local:
            shard.read(found, name)
        params = self.params.copy() if self._remote else None  # replies overwrite it
        for s, far in self._remote:
            far.read_vector(name)
            for lo, hi in self._store.ranges[s]:
                found[lo:hi] = self.params[lo:hi]
        if params is not None:
            self.params[:] = params
        return found

    # Gradients.

    def _reads_since(self) -> int:
        """Return the number of reads since the last call."""
        reads, self._reads = self._reads, 0
        return reads

    def begin(self, loss: float) -> None:
        if not math.isfinite(loss) and self._nan == "stop":
            losses = np.zeros(self._plan.workers)
            losses[self._worker] = loss
            raise non_finite_error(losses, self._work.step)
        self._step_loss = loss

    def ready(self, start: int) -> None:
        """Do nothing: the gradient is submitted as a whole."""

    def finish(self) -> None:
        raise NotImplementedError

    # The end.

    def close(self) -> None:
        workers = self._store.cluster.workers
        barrier = workers.Ibarrier()
        self._store.waiting.until(lambda spins: barrier.Test())
        self._arrive()
        self._read(self._least_version(self.step))

    def totals(self) -> Totals:
        state = self.state()
        return Totals(state.loss, state.done - self._begin_step - state.skipped, state.skipped, state.worker_stats)

    def trace(self, wrap: Wrap) -> None:
        wrap(self, "next", "wait")
        wrap(self, "_read", "pull")
        wrap(self, "finish", "push")
        for _, shard in self._local:
            wrap(shard, "apply", "update")

    def free(self) -> None:
        self._store.free()
