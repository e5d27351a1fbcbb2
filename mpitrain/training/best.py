"""The best value of a validation metric: early stopping, and the steps whose checkpoints are kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..checkpoint import BestCheckpoint
from ..core.extra_state import ExtraState, Value, Versioned, values_of
from ..core.words import counted
from ..errors import ConfigError
from ..monitor.format import metric as format_metric
from ..plan.hook import Hook, TrainingLoop
from ..plan.metric import PREFIX, Goal
from ..plan.progress import ConsistentPoint

_NAMESPACE, _VERSION = "best", 1


class TrackBest(Hook):
    """Finishes training early when a validation metric stops improving, and records the best step.

    The hook has the same state on all workers, because all workers get the same validation metrics. Called after the
    hook that validates.

    Args:
        goal: The metric; None to do nothing.
        patience: The number of validations without improvement after which training ends; None for no early end.
        keeps: Whether checkpoints of the best steps are kept.

    Attributes:
        best: The best value so far.
        step: The step of the best value; -1 if there is none.
        failures: The number of validations since the best value.
    """

    def __init__(self, goal: Goal | None, patience: int | None, keeps: bool) -> None:
        self._goal, self._patience, self._keeps = goal, patience, keeps
        self.best, self.step, self.failures = 0.0, -1, 0
        self._seen = -1  # the step of the last validation

    def at_consistent_point(self, loop: TrainingLoop, point: ConsistentPoint) -> None:
        goal = self._goal
        if goal is None or loop.validation_step != point.step or self._seen == point.step:
            return
        self._seen = point.step
        value = _value(goal.name, loop.validation)
        if goal.is_better(value, self.best if self.step >= 0 else None):
            self.best, self.step, self.failures = value, loop.measured_step, 0
        else:
            self.failures += 1
        if self._patience is not None and self.failures >= self._patience and not point.last:
            loop.stop(
                f"{goal.name} has not improved in {counted(self.failures, 'validation')}"
                + (f" since {format_metric(self.best)} at step {self.step:,}" if self.step >= 0 else "")
            )

    def record(self, step: int) -> BestCheckpoint | None:
        """Return the record of ``step`` if it is the best step and best checkpoints are kept, else None. Local."""
        if self._goal is None or not self._keeps or self.step != step:
            return None
        return BestCheckpoint(step, self._goal.name, self.best)

    def extra_state(self) -> ExtraState:
        if self._goal is None:
            return {}
        values: dict[str, Value] = {
            "metric": self._goal.name,
            "best": self.best,
            "step": self.step,
            "failures": self.failures,
        }
        return {_NAMESPACE: Versioned(_VERSION, values)}

    def load_extra_state(self, state: ExtraState) -> None:
        """Restore the state, unless it belongs to another metric."""
        if self._goal is None:
            return
        values: Mapping[str, Any] = values_of(state, _NAMESPACE, _VERSION)
        if values.get("metric") == self._goal.name:
            self.best, self.step = float(values["best"]), int(values["step"])
            self.failures = int(values["failures"])


def _value(name: str, validation: Mapping[str, float]) -> float:
    """Return the value of a metric.

    Raises:
        ConfigError: The validation has no such metric.
    """
    if PREFIX + name in validation:
        return validation[PREFIX + name]
    names = ", ".join(key.removeprefix(PREFIX) for key in validation)
    raise ConfigError(f"--stop-metric {name}: the validation has no such metric; it has {names}")
