"""A parameter server of ``--mode backup`` on several nodes: it sums a step's gradients and applies the sum."""

from __future__ import annotations

import numpy as np

from ...core.layout import Array
from ...monitor.trace import span
from ..non_finite import NonFinitePolicy
from .backup import BackupStore
from .collected_steps import CollectedSteps
from .server import Server


def make_server(store: BackupStore) -> Server:
    """Return a ``BackupServer``, or a plain ``Server`` if all ranks share a node: there, the workers update. Local."""
    return Server(store) if store.on_one_node else BackupServer(store)


class BackupServer(Server):
    """See ``Server``. When it has all gradients of a step, it sums them in work item order and applies the sum."""

    polls = True

    def __init__(self, store: BackupStore) -> None:
        super().__init__(store)
        plan = store.plan
        assert self._coordinator is None or isinstance(self._coordinator, CollectedSteps)
        self._steps, self._gradients = self._coordinator, store.gradients
        self._servers = store.cluster.training.comm
        self._gradients_per_step = plan.gradients_per_step
        self._non_finite = NonFinitePolicy(plan.config.training.nan, plan.workers)
        self._sum = np.zeros(plan.layout.size, plan.dtype)
        self._arrived: list[tuple[int, int, float, Array]] = []  # work item, step, loss, gradient

    def _is_changed_by_workers(self) -> bool:
        return False

    def _collect(self, client: int, item: int, step: int, loss: float) -> None:
        assert self._rpc is not None
        # The gradient does not change until the step is applied: its worker waits for the reply.
        self._arrived.append((item, step, loss, self._rpc.request_vector(client)))

        def respond() -> bool:
            if self._shard.version <= step:
                return False
            self._reply(client)
            return True

        self._deferred.append(respond)

    def _apply_steps(self) -> bool:
        step = self._shard.version
        ready = [(item, loss, grads) for item, of, loss, grads in self._arrived if of == step]
        if self._gradients is not None:
            ready += self._gradients.marked(step)
        if len(ready) < self._gradients_per_step:
            return False
        ready.sort(key=lambda gradient: gradient[0])
        self._apply_step([grads for _, _, grads in ready], sum(loss for _, loss, _ in ready))
        self._arrived = [gradient for gradient in self._arrived if gradient[1] != step]
        return True

    @span("update")
    def _apply_step(self, gradients: list[Array], loss: float) -> None:
        skipped = not self._non_finite.applies(loss)
        if skipped:
            self._shard.skip_step()
        else:
            for index, grads in enumerate(gradients):
                self._shard.accumulate(grads, self._sum, first=index == 0)
            self._shard.apply_step(self._sum, self._sum_over_servers)
        if self._steps is not None:
            self._steps.step_done(loss, skipped)

    def _sum_over_servers(self, own: Array) -> Array:
        """Return the sum over all servers, in server order, for norms of whole vectors. Collective over the servers."""
        all_servers = np.empty((self._servers.size, len(own)))
        self._servers.Allgather(own, all_servers)
        total: Array = all_servers.sum(axis=0)
        return total
