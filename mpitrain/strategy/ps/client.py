"""``--mode async``, ``ssp`` and ``backup``: what a worker does whose parameters live with servers.

A worker takes a ticket, reads the newest parameters, computes a gradient, and hands it in; then it goes on. What
becomes of the gradient is the mode's: ``Asynchronous`` has every shard apply it as it comes, ``Backup`` collects the
first of a step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from ...core.layout import Array
from ..base import StepResult, Totals, Turn, Work, Wrap, not_finite
from .coordinator import END, PAUSE, WAIT, State
from .remote import RemoteLedger, RemoteShard
from .shard import Shard
from .store import Store


class Served:
    """What the modes have in common; see ``base.Strategy`` for the methods.

    Local, but for ``close`` and ``free``.

    Args:
        store: Where the parameters are; freed with this.
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
        self.vectors, self.has_average = plan.vectors, plan.moving is not None
        self.step, self.position = store.step, store.position
        self._begin_step, self._begin_position = store.step, store.position
        self.params, self.grads = self._memory()
        self._local: list[tuple[int, Shard]] = sorted(store.shards.items())
        mail = store.mail
        self._remote: list[tuple[int, RemoteShard]] = []
        if mail is not None:
            self._remote = [(s, RemoteShard(mail, store.holders[s], plan.vectors)) for s in store.remote]
        self._ledger = store.ledger
        self._far = None
        if self._ledger is None:
            assert mail is not None
            self._far = RemoteLedger(mail, store.holders[0])
        self._versions = [0] * len(store.holders)
        self._ticket, self._work = 0, Work(0, 0)
        self._step_loss = 0.0
        self.result = StepResult(math.nan, True)
        self._reads = 0  # that have not been reported yet

    @property
    def numbers(self) -> Mapping[str, float]:
        return {}

    def _memory(self) -> tuple[Array, Array]:
        """This worker's parameters and gradient; the former where mail brings them, if it does."""
        size, dtype, mail = self._plan.layout.size, self._plan.dtype, self._store.mail
        arrives = mail is not None and len(mail.vector) == size
        params = mail.vector if mail is not None and arrives else np.zeros(size, dtype)
        return params, np.zeros(size, dtype)

    # Tickets.

    def pause_at(self, step: int) -> None:
        if not self._chief:
            return
        if self._ledger is not None:
            self._ledger.open_gate(step)
        elif self._far is not None:
            self._far.open_gate(step)

    def pause_soon(self) -> None:
        self.pause_at(self.step)

    def take(self) -> Work | Turn:
        ticket, step, ahead = self._next_ticket()
        if ticket == END:
            return Turn.END
        if ticket == PAUSE:
            self._arrive()
            self._read(self._least_version(self.step))  # every shard has come there, too
            return Turn.PAUSE
        self._ticket, self._ahead = ticket, ahead
        self._work = Work(step, self._position(ticket))
        self._read(step)
        return self._work

    def _next_ticket(self) -> tuple[int, int, int]:
        if self._far is not None:
            return self._far.take()
        taken = (WAIT, 0, 0)

        def try_to() -> bool:
            nonlocal taken
            assert self._ledger is not None
            taken = self._ledger.take(self._worker, self._chief)
            return taken[0] != WAIT

        self._store.waiting.until(lambda spins: try_to())
        return taken

    def _arrive(self) -> None:
        """Learn where training stands, when everybody stands still."""
        state = self.state()

        def still() -> bool:
            nonlocal state
            state = self.state()
            return state.done == state.begun

        if state.done != state.begun:  # a server is about to count the last step
            self._store.waiting.until(lambda spins: still())
        self.step, self.position = state.done, self._position(state.tickets)

    def _position(self, ticket: int) -> int:
        """Where the examples of a ticket begin."""
        first = 0 if self._plan.config.mode == "backup" else self._begin_step
        return self._begin_position + (ticket - first) * self._plan.batch

    def state(self) -> State:
        """Where training stands, and what each worker has done since this run began."""
        if self._ledger is not None:
            return self._ledger.state()
        assert self._far is not None
        return self._far.state()

    def stop(self) -> None:
        (self._ledger or self._far).stop()  # type: ignore[union-attr]

    # Parameters.

    def _least_version(self, step: int) -> int:
        """The version that parameters for a step must have at least."""
        return 0

    def _read(self, step: int) -> None:
        """Bring the newest parameters here."""
        self._reads += 1
        least = self._least_version(step)
        for _, far in self._remote:
            far.post_read(least)
        for s, shard in self._local:
            self._store.waiting.until(lambda spins, shard=shard: shard.version >= least)  # type: ignore[misc]
            self._versions[s] = shard.read(self.params)
        for s, far in self._remote:
            self._versions[s] = far.wait_read()

    def computable(self, name: str) -> Array:
        return self.complete(name)

    def complete(self, name: str) -> Array:
        """One of the vectors, as it is now; reading ``params`` makes this worker's the newest."""
        if name == "params":
            self._read(0)
            return self.params
        found = np.zeros_like(self.params)
        for _, shard in self._local:
            shard.read(found, name)
        params = self.params.copy() if self._remote else None  # which mail overwrites
        for s, far in self._remote:
            far.read_vector(name)
            for lo, hi in self._store.ranges[s]:
                found[lo:hi] = self.params[lo:hi]
        if params is not None:
            self.params[:] = params
        return found

    # Gradients.

    def _reads_since(self) -> int:
        """How often parameters were read since this was called last."""
        reads, self._reads = self._reads, 0
        return reads

    def begin(self, loss: float) -> None:
        if not math.isfinite(loss) and self._nan == "stop":
            losses = np.zeros(self._plan.workers)
            losses[self._worker] = loss
            raise not_finite(losses, self._work.step)
        self._step_loss = loss

    def ready(self, start: int) -> None:
        """Nothing to do: the gradient is handed in whole."""

    def finish(self) -> None:
        raise NotImplementedError

    # The end.

    def close(self) -> None:
        workers = self._store.cluster.workers
        everybody = workers.Ibarrier()
        self._store.waiting.until(lambda spins: everybody.Test())
        self._arrive()
        self._read(self._least_version(self.step))

    def totals(self) -> Totals:
        state = self.state()
        return Totals(state.loss, state.done - self._begin_step - state.skipped, state.skipped, state.accounts)

    def trace(self, wrap: Wrap) -> None:
        wrap(self, "take", "wait")
        wrap(self, "_read", "pull")
        wrap(self, "finish", "push")
        for _, shard in self._local:
            wrap(shard, "apply", "update")

    def free(self) -> None:
        self._store.free()
