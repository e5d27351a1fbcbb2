"""``--mode local``: every worker trains alone for some steps, then all workers average as in ``averaging``.

With ``local_after``, the workers average their gradients until that step, as in ``sync``, and train alone afterwards
(post-local SGD: Lin, Stich, Patel and Jaggi, Don't use large mini-batches, use local SGD, 2018).

With ``virtual_workers``, a rank trains several workers, one after the other in every step. Each has its own copy of the
vectors. Means are taken over all of them, by the tree of ``comm.sum_order``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from ..checkpoint.snapshot import Snapshot
from ..comm.allreduce import MeanAllreduce
from ..comm.cluster import Cluster
from ..comm.hierarchy import hierarchy_of
from ..core.device import Device
from ..core.extra_state import ExtraState
from ..core.host_memory import available_bytes
from ..core.layout import Array, row_stride
from ..core.training_state import TrainingState
from ..errors import ConfigError, JobError
from ..monitor.format import size_of
from ..monitor.trace import span
from ..optim import Optimizer
from ..optim.whole_tensors import WholeTensorOptimizer
from ..plan.plan import Plan
from ..plan.progress import Progress
from .averaging import Averaging, ElasticAveraging, MeanOfWorkers
from .base import Part, Stats, StepResult
from .bulk_synchronous import BulkSynchronous
from .outer_optimizer import OuterOptimization
from .tensor_updates import TensorUpdates

_log = logging.getLogger(__name__)

_LOSS, _COUNTED, _SKIPPED, _FLAGS, _KIND = range(5)
_AVERAGES, _AGREES = range(2)  # the next action of a worker that sends its status


class Local(BulkSynchronous):
    """Local SGD in all its forms; see ``base.Strategy`` for the methods.

    The methods of a step are collective over the workers in a step that averages, else local.
    """

    averages_grads = has_slots = updates_whole_tensors = True

    def __init__(self, cluster: Cluster, plan: Plan, devices: Sequence[Device], state: TrainingState) -> None:
        super().__init__(cluster, plan)
        parallel, size, virtual = plan.config.parallel, plan.layout.size, plan.config.virtual_workers
        self._workers = plan.workers_of(cluster.workers.rank)
        n_own = len(self._workers)
        nbytes = (4 + cluster.training.node.allreduce(n_own)) * plan.nbytes
        self._hierarchy = hierarchy = hierarchy_of(cluster, nbytes, parallel.shared_memory)
        if virtual is not None:
            _check_memory(cluster, plan, n_own)
        self._own = {name: np.zeros((n_own, row_stride(size)), plan.dtype)[:, :size] for name in plan.vectors}
        # The vectors of each worker that trains in turn on this rank; usually one.
        self._of_workers = [{name: rows[index] for name, rows in self._own.items()} for index in range(n_own)]
        self._updaters = [plan.updater(vectors, state.frozen) for vectors in self._of_workers]
        self.initial_vectors, self.grads = self._of_workers[0], np.zeros(size, plan.dtype)
        self._take_turn(0)
        if isinstance(plan.optimizer, WholeTensorOptimizer):
            self.tensors = TensorUpdates(plan.optimizer, plan.layout, state.frozen, (0, size))
        self._has_averaged = False  # whether this step has called ``average``
        self._accepts = True  # whether ``--nan`` accepts all losses since the last update
        self._mean = MeanAllreduce(hierarchy, size, plan.dtype, leaves=virtual)
        self._first_local_step = parallel.first_local_step
        self._local = self._make_averaging(state)
        self._averaging = self._local if parallel.first_local_step == 0 else Averaging(self._own)
        if parallel.first_local_step >= plan.train_steps:
            _log.info(
                "--mode local has no effect: training ends at step %d, and --local-after is %d",
                plan.train_steps,
                parallel.first_local_step,
            )
        self._since = np.zeros(3)  # this worker's totals since the last average, exchanged at the next average

    def _make_averaging(self, state: TrainingState) -> Averaging:
        """Return the averaging method of workers that train alone."""
        parallel, common = self.plan.config.parallel, (self.plan, self._own, self._mean, self._hierarchy)
        if parallel.outer_optimizer is not None:
            return OuterOptimization(*common, state.frozen)
        if parallel.elastic_rho is not None:
            return ElasticAveraging(*common[:-1], parallel.elastic_rho)
        return MeanOfWorkers(*common, self.tensors)

    def start(self, progress: Progress, extra_state: ExtraState) -> None:
        super().start(progress, extra_state)
        for rows in self._own.values():
            rows[1:] = rows[0]
        if progress.step >= self._first_local_step:
            self._averaging = self._local
        self._averaging.start(extra_state)

    def ready(self, start: int) -> None:
        self._averaging.progress()

    def average(self) -> None:
        """Check the loss; unless the workers train alone, also average the gradients."""
        self._has_averaged = True
        if self.progress.step < self._first_local_step:
            self._average_gradients()
        else:
            self._check_own()

    def _check_own(self) -> None:
        worker = self._workers[self._turn]
        self._accepts &= self.non_finite.check_own(float(self.loss), worker, self.progress.step)

    def update(self, part: Part | None = None) -> None:
        self.await_release()
        if self._accepts:
            self._update(part)
        if self._turn + 1 < len(self._updaters):
            self._count_own()
            self._accepts, self._has_averaged = True, False
            self._take_turn(self._turn + 1)

    def _take_turn(self, index: int) -> None:
        """Train this worker of the rank now."""
        self._turn, self.params, self._updater = index, self._of_workers[index]["params"], self._updaters[index]

    def _count_own(self) -> None:
        """Count the result of the worker that has its turn."""
        loss, accepted = float(self.loss), self._accepts
        if accepted:
            self._since[_LOSS] += loss
        self._since[_COUNTED if accepted else _SKIPPED] += 1
        if self._turn == 0:
            self.last_result = StepResult(loss, accepted)

    def change_params(self, change: Callable[[], object]) -> None:
        change()

    def set_optimizer(self, optimizer: Optimizer) -> None:
        for updater in self._updaters:
            updater.set_optimizer(optimizer)

    def set_slots(self, slots: Mapping[str, Array], updates: int) -> None:
        self.await_release()
        for name, values in slots.items():
            self._own[name][:] = values
        self.step_offset = updates - self.progress.step

    def end_step(self, updated: bool, complete: bool) -> None:
        if not self._has_averaged:
            self._check_own()
        self._has_averaged = False
        self.step_offset -= not updated
        self._count_own()
        self._accepts |= complete
        self.await_release()
        self.advance()
        self._take_turn(0)
        self._agree(self.progress.step)

    def vector(self, name: str) -> Array:
        return self._averaging.vector(name)

    def snapshot(self) -> Snapshot:
        self.await_release()
        return self.snapshot_of(self._averaging.vectors(), private=self._averaging.copies)

    def extra_state(self) -> ExtraState:
        return {**super().extra_state(), **self._averaging.extra_state()}

    @property
    def waited_s(self) -> float:
        return self._hierarchy.barrier.waited_s

    def stats(self) -> Stats:
        sent, uncompressed = self._hierarchy.internode_bytes, self._hierarchy.uncompressed_bytes
        return super().stats()._replace(internode_bytes=sent, saved_bytes=max(0, uncompressed - sent))

    def close(self) -> None:
        self._local.free()
        self._mean.free()
        self._hierarchy.free()

    @span("update")
    def _update(self, part: Part | None) -> None:
        if self.tensors is not None:
            self.tensors.update(self.grads, None if part is None else part.names)
        self._updater.update_all(self.grads, self.rule_step)

    def _agree(self, step: int) -> None:
        """Perform the exchanges that are due after ``step`` steps."""
        self._averaging.after_step(step)
        if not self._averaging.is_point(step):
            return
        flags = self._exchange_totals()
        if step == self._first_local_step:
            self._averaging = self._local
            self._averaging.start({})
        self.enter_consistent_point(flags)
        if self.has_ended:
            self._averaging.end()

    @span("average")
    def _average_gradients(self) -> None:
        """Replace ``grads`` with the mean over the workers, and check all losses."""
        losses = self._exchange_statuses(_AVERAGES, float(self.loss))[:, _LOSS]
        self._accepts &= self.non_finite.check(float(losses.sum()), losses, self.progress.step)
        self._mean(self.grads)

    def _exchange_totals(self) -> int:
        """Add all workers' totals since the last average; return the union of all flags. Collective over workers."""
        all_workers = self._exchange_statuses(_AGREES, *self._since)
        loss, counted, skipped = all_workers[:, :_FLAGS].sum(axis=0).tolist()
        self.tally_totals(self.progress.step, loss, int(counted), int(skipped))
        self._since[:] = 0
        return int(np.bitwise_or.reduce(all_workers[:, _FLAGS].astype(np.int64)))

    def _exchange_statuses(self, kind: int, loss: float, counted: float = 0, skipped: float = 0) -> Array:
        """Return these numbers and ``flags`` of all workers, shape (workers, 5). Collective over the workers.

        Raises:
            JobError: The workers do different things in this step; on all workers.
        """
        comm = self._hierarchy.comm
        all_workers = np.empty((comm.size, 5))
        comm.Allgather(np.array([loss, counted, skipped, self.flags, kind]), all_workers)
        if (all_workers[:, _KIND] != kind).any():
            raise JobError(
                "the workers have made different calls in a step before --local-after: all workers "
                "must call step and use gradients in the same steps",
                on_all_ranks=True,
            )
        return all_workers


def _check_memory(cluster: Cluster, plan: Plan, n_own: int) -> None:
    """Check that this host has memory for the vectors of all virtual workers of its ranks. Collective over the workers.

    Raises:
        ConfigError: It does not.
    """
    own = n_own * (len(plan.vectors) + 3)  # also what is averaged, and at most two copies of the parameters
    if cluster.chief:
        own += plan.gradients_per_step * len(plan.vectors)  # for a checkpoint
    needed, available = cluster.training.node.allreduce(own) * plan.nbytes, available_bytes()
    with cluster.training.agree("allocating the vectors of virtual workers"):
        if needed > available:
            raise ConfigError(
                f"--virtual-workers {plan.config.virtual_workers}: their parameters and slots need {size_of(needed)} "
                f"on this host, but {size_of(available)} are available; use fewer virtual workers, or more hosts"
            )
