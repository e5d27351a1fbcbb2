"""How the workers of ``--mode local`` average their parameters.

Every ``local_steps`` steps, ``MeanOfWorkers`` replaces parameters, optimizer slots and moving averages by their means
over the workers. (Stich, Local SGD converges fast and communicates little, 2019; with momentum averaged too: Yu, Jin
and Yang, 2019.) ``ElasticAveraging`` moves the workers' parameters towards a center, and the center towards the
workers' parameters. The center is the trained model. (Zhang, Choromanska and LeCun, Deep learning with elastic
averaging SGD, 2015, equations 2 and 3, synchronous.) ``outer_optimizer`` contains a third method.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..comm.allreduce import MeanAllreduce
from ..comm.hierarchy import Hierarchy
from ..core.extra_state import ExtraState
from ..core.layout import Array
from ..monitor.trace import span
from ..plan.plan import Plan
from .tensor_updates import TensorUpdates

_WAIT = span("wait")


class Averaging:
    """Base class of the averaging methods. It averages nothing, and is used while the workers' vectors are equal.

    Construction is collective over the workers, and so is every method that is not documented as local.

    Args:
        own: The vectors of this rank's workers by name, shape (workers, layout.size) each. There is one worker unless
            virtual workers train in turn.

    Attributes:
        copies: Whether ``vectors`` returns copies, which do not change.
    """

    copies = False

    def __init__(self, own: Mapping[str, Array]) -> None:
        self.own = own

    def is_point(self, step: int) -> bool:
        """Return whether the trained model is defined after ``step`` steps; then a consistent point follows. Local."""
        return True

    def start(self, extra_state: ExtraState) -> None:
        """Begin to train; ``own`` has the same values for all workers.

        Args:
            extra_state: The state of the resumed run; empty if no run is resumed, or after steps of gradient averaging.
        """

    def progress(self) -> None:
        """Let MPI progress an exchange that overlaps with local steps. Local."""

    def after_step(self, step: int) -> None:
        """Average the vectors that are due after ``step`` steps; local if nothing is due."""

    def vector(self, name: str) -> Array:
        """Return a vector of the trained model, at a consistent point; valid until the next call or step."""
        vector: Array = self.own[name][0]
        return vector

    def vectors(self) -> dict[str, Array]:
        """Return all vectors of the trained model, at a consistent point, for a checkpoint."""
        return {name: self.vector(name) for name in self.own}

    def extra_state(self) -> ExtraState:
        """Return the state that is not in ``vectors``, at a consistent point."""
        return {}

    def end(self) -> None:
        """Set the workers' parameters to the parameters of the trained model, at the last consistent point. Local."""

    def free(self) -> None:
        """Free communicators."""


class Periodic(Averaging):
    """Base class: the workers average after every ``local_steps`` steps, and after the last step."""

    def __init__(self, plan: Plan, own: Mapping[str, Array], mean: MeanAllreduce) -> None:
        super().__init__(own)
        self._plan, self._every, self._mean = plan, plan.config.parallel.steps_per_average, mean

    def is_point(self, step: int) -> bool:
        return step % self._every == 0 or step == self._plan.train_steps

    def after_step(self, step: int) -> None:
        if self.is_point(step):
            self.average()

    @span("average")
    def average(self) -> None:
        """Average now."""


class MeanOfWorkers(Periodic):
    """Averages all vectors.

    Args:
        hierarchy: The hierarchy of the workers.
        tensors: Updates of whole tensors, whose state is averaged, too; None if there are none.
    """

    def __init__(
        self,
        plan: Plan,
        own: Mapping[str, Array],
        mean: MeanAllreduce,
        hierarchy: Hierarchy,
        tensors: TensorUpdates | None,
    ) -> None:
        super().__init__(plan, own, mean)
        self._workers, self._tensors, self._dtype = hierarchy.comm, tensors, plan.dtype

    @span("average")
    def average(self) -> None:
        for vector in self.own.values():
            self._mean(vector)
        if self._tensors is not None:
            self._tensors.average(self._mean, self._workers, self._dtype)


class Centered(Periodic):
    """Base class: the parameters of the trained model are a center, from which the workers deviate.

    Attributes:
        center: Shape (layout.size,).
    """

    copies = True
    center: Array

    def vector(self, name: str) -> Array:
        if name == "params":
            return self.center
        vectors = self.own[name].copy()
        with _WAIT:
            self._mean(vectors)
        vector: Array = vectors[0]
        return vector

    def vectors(self) -> dict[str, Array]:
        return super().vectors() | {"params": self.center.copy()}

    def end(self) -> None:
        self.own["params"][:] = self.center


class ElasticAveraging(Centered):
    """Moves workers' parameters towards the center, and the center towards them, by ``rho`` times the difference."""

    def __init__(self, plan: Plan, own: Mapping[str, Array], mean: MeanAllreduce, rho: float) -> None:
        super().__init__(plan, own, mean)
        self.center, self._rho, self._n_workers = np.zeros_like(own["params"][0]), rho, plan.gradients_per_step

    def start(self, extra_state: ExtraState) -> None:
        self.center[:] = self.own["params"][0]

    @span("average")
    def average(self) -> None:
        params, center = self.own["params"], self.center
        mean = params.copy()
        self._mean(mean)
        away: Any = params - center
        params -= params.dtype.type(self._rho) * away
        center += params.dtype.type(self._rho * self._n_workers) * (mean[0] - center)
