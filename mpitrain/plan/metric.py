"""Metrics of validation: functions of a model's outputs and the labels, and which of their values are better."""

from __future__ import annotations

import math
import numbers
import re
import sys
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

from ..core.words import one_line
from ..errors import ConfigError, JobError

PREFIX = "validation_"  # prefix of the names of validation metrics in records
MEASURED = ("loss", "accuracy")  # metrics that every validation of a job measures
_HIGHER_IS_BETTER = {"loss": False, "accuracy": True}
_DIRECTIONS = {"min": False, "max": True}
_NAME = re.compile(r"[A-Za-z][\w.-]*")


@runtime_checkable
class MetricObject(Protocol):
    """A metric that gets batches, such as a metric of torchmetrics."""

    def reset(self) -> Any: ...

    def update(self, outputs: Any, labels: Any, /) -> Any: ...

    def compute(self) -> Any: ...


Metric: TypeAlias = Callable[[Any, Any], Any] | MetricObject


class Totals(NamedTuple):
    """Sums over validation examples.

    Attributes:
        loss: Sum of the losses.
        weight: The number of examples; or of labels that count, or the sum of their weights.
        correct, predictions: Numbers of correct and of all predictions; 0 if there is no accuracy.
    """

    loss: float
    weight: float
    correct: int = 0
    predictions: int = 0

    @classmethod
    def of_examples(cls, loss: float, correct: int | None, count: int) -> Totals:
        """Return the result of ``nn.Loss.evaluate`` for this number of examples."""
        return cls(loss, count) if correct is None else cls(loss, count, correct, count)

    def means(self) -> dict[str, float]:
        """Return the loss, and the accuracy if it is defined.

        Raises:
            JobError: No label counts.
        """
        if not self.weight:
            raise JobError(
                "no validation label counts in the loss: all are ignored (ignore_index), or have classes of weight 0; "
                "change the labels, the loss, or Job(validation=...)"
            )
        accuracy = {"accuracy": self.correct / self.predictions} if self.predictions else {}
        return {"loss": self.loss / self.weight, **accuracy}


class Goal(NamedTuple):
    """A metric whose value should improve.

    Attributes:
        name: The name of the metric, without ``PREFIX``.
        is_higher_better: Whether higher values are better; else lower values are better.
    """

    name: str
    is_higher_better: bool

    def is_better(self, value: float, best: float | None) -> bool:
        """Return whether a value is better than the best value so far, None if there is none; NaN is never better."""
        if best is None:
            return not math.isnan(value)
        return value > best if self.is_higher_better else value < best


def parse_goal(option: str, text: str) -> Goal:
    """Return the goal ``NAME``, ``NAME:min`` or ``NAME:max``.

    Args:
        option: The flag that has this value, for errors.

    Raises:
        ConfigError: The direction is not valid, or not known for this metric.
    """
    name, colon, direction = text.removeprefix(PREFIX).partition(":")
    if name and not colon and name in _HIGHER_IS_BETTER:
        return Goal(name, _HIGHER_IS_BETTER[name])
    if not name or direction not in _DIRECTIONS:
        name = name or "NAME"
        raise ConfigError(
            f"{option} is {text!r}: must be {name}:max if higher values are better, {name}:min if lower ones are; only "
            f"{' and '.join(_HIGHER_IS_BETTER)} need no direction"
        )
    return Goal(name, _DIRECTIONS[direction])


def is_name(name: object) -> bool:
    """Return whether a metric may have this name."""
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


def check_metrics(where: str, metrics: object, reserved: Collection[str] = ()) -> None:
    """Check metrics by name.

    Args:
        where: The argument that has this value, for errors.
        reserved: Names that are not valid.

    Raises:
        JobError: The values are not metrics, or a name is not valid.
    """
    if not isinstance(metrics, Mapping):
        raise JobError(f'{where} got {type(metrics).__name__}: must be a dict, such as {{"top5": top5}}')
    for name, metric in metrics.items():
        if not is_name(name):
            raise JobError(f"{where} has the name {name!r}: must be letters, digits and any of _ . -, after a letter")
        if name in reserved:
            raise JobError(f"{where} has the name {name!r}, which is reserved for a built-in metric: use another name")
        if isinstance(metric, type):
            raise JobError(f"{where}: {name!r} is the class {metric.__name__}: must be an object, {metric.__name__}()")
        if not callable(metric) and not isinstance(metric, MetricObject):
            raise JobError(
                f"{where}: {name!r} is {metric!r}: must be a function of outputs and labels, or an object with update, "
                "compute and reset, such as one of torchmetrics"
            )


def measure(metrics: Mapping[str, Metric], outputs: Any, labels: Any) -> dict[str, float]:
    """Return the values of all metrics. Local.

    Args:
        outputs, labels: The outputs and labels of all examples: arrays, tensors, or trees of these.

    Returns:
        The values by name; a metric that returns a dict has a value ``NAME_KEY`` for each key.

    Raises:
        JobError: A metric fails, or returns no number; the message names the metric.
    """
    values: dict[str, float] = {}
    for name, metric in metrics.items():
        result = _result(name, metric, outputs, labels)
        parts = {f"{name}_{key}": value for key, value in result.items()} if isinstance(result, Mapping) else None
        for key, value in ({name: result} if parts is None else parts).items():
            if key in values:
                raise JobError(f"two metrics have the value {key!r}: rename one")
            values[key] = number_of(f"the metric {name!r} returned", value)
    return values


def measure_parts(
    metrics: Mapping[str, Metric], join: Callable[[Sequence[Any]], Any], parts: Sequence[tuple[Any, Any]]
) -> dict[str, float]:
    """Return the values of all metrics for the outputs and labels of several batches. Local.

    Args:
        join: Returns the outputs, or labels, of all batches as one value.

    Raises:
        JobError: As ``measure``; or the batches cannot be joined.
    """
    try:
        outputs, labels = (join(values) for values in zip(*parts, strict=True))
    except (TypeError, ValueError, RuntimeError, KeyError) as error:
        text = one_line(error)
        raise JobError(
            f"outputs or labels of several batches cannot be joined for metrics: {text}; they must differ in the "
            "number of examples only"
        ) from error
    return measure(metrics, outputs, labels)


def _result(name: str, metric: Metric, outputs: Any, labels: Any) -> Any:
    outputs, labels = _as_taken(metric, outputs), _as_taken(metric, labels)
    try:
        if not isinstance(metric, MetricObject):
            return metric(outputs, labels)
        metric.reset()
        metric.update(outputs, labels)
        result = metric.compute()
        metric.reset()  # frees the batches that it has stored
        return result
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)[1:]
        # The line of the metric, not of libraries that it calls.
        own = [frame for frame in frames if frame.filename == frames[0].filename]
        place = f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""
        text = one_line(error)
        raise JobError(f"the metric {name!r} fails: {type(error).__name__}: {text}{place}") from error


def _as_taken(metric: Metric, value: Any) -> Any:
    """Return an array as a tensor if the metric is a torch module, such as one of torchmetrics."""
    torch, numpy = map(sys.modules.get, ("torch", "numpy"))  # imported if there are modules and arrays
    if torch and numpy and isinstance(value, numpy.ndarray) and isinstance(metric, torch.nn.Module):
        return torch.from_numpy(value)
    return value


def number_of(what: str, value: Any) -> float:
    """Return a number, a NumPy scalar, or an array or tensor without dimensions as a float.

    Args:
        what: The name of the value, for errors.

    Raises:
        JobError: The value is none of these.
    """
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):  # an array of NumPy, or a tensor of torch
        value = value.item()
    if not isinstance(value, numbers.Real):
        shape = getattr(value, "shape", None)
        got = type(value).__name__ + (f" of shape {tuple(shape)}" if shape is not None else "")
        raise JobError(f"{what} {got}: must be a number{', or a dict of numbers' * ('metric' in what)}")
    return float(value)
