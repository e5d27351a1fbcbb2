"""Metrics and the options that use them: valid forms, values, and the choice of the best value."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mpitrain import Job, data, nn, optim
from mpitrain.errors import ConfigError, JobError
from mpitrain.plan.config import RunConfig
from mpitrain.plan.metric import Goal, Totals, measure, measure_parts, parse_goal
from mpitrain.plan.plan import make_plan
from mpitrain.plan.progress import ConsistentPoint
from mpitrain.training.best import TrackBest

OUTPUTS, LABELS = np.array([[1.0], [2.0]]), np.array([1.0, 4.0])


class Sum:
    """A metric with the interface of torchmetrics."""

    def __init__(self) -> None:
        self.total: Any = "not reset"

    def reset(self) -> None:
        self.total = 0.0

    def update(self, outputs: Any, labels: Any) -> None:
        self.total += outputs.sum()

    def compute(self) -> Any:
        return {"of outputs": np.array(self.total)}


def make_job(**arguments: Any) -> Job:
    split = data.from_arrays(np.ones((8, 1), np.float32), np.ones(8, np.float32))
    model = nn.Sequential(nn.Dense(1, 1))
    return Job(model, nn.MeanSquaredError(), optim.sgd(0.1), split, **arguments)


def test_values_of_functions_and_objects() -> None:
    metrics = {"f": lambda outputs, labels: np.float32(outputs[1, 0]), "d": lambda *_: {"a": 1, "b": True}, "s": Sum()}
    expected = {"f": 2.0, "d_a": 1.0, "d_b": 1.0, "s_of outputs": 3.0}
    assert measure(metrics, OUTPUTS, LABELS) == expected
    assert measure_parts(metrics, np.concatenate, [(OUTPUTS[:1], LABELS[:1]), (OUTPUTS[1:], LABELS[1:])]) == expected


@pytest.mark.parametrize("result", [None, "high", OUTPUTS, [1.0], 1j, {"a": LABELS}])
def test_a_result_that_is_no_number(result: Any) -> None:
    with pytest.raises(JobError, match="'m'"):
        measure({"m": lambda *_: result}, OUTPUTS, LABELS)


def test_two_values_of_one_name_and_parts_that_do_not_fit() -> None:
    with pytest.raises(JobError, match="'a_b'"):
        measure({"a_b": lambda *_: 1, "a": lambda *_: {"b": 2}}, OUTPUTS, LABELS)
    with pytest.raises(JobError, match="joined"):
        measure_parts({}, np.concatenate, [(OUTPUTS, LABELS), (LABELS, LABELS)])


@pytest.mark.parametrize(
    "metrics", [{"loss": sum}, {"accuracy": sum}, {"a b": sum}, {"": sum}, {3: sum}, {"m": 3}, {"m": Sum}, [sum]]
)
def test_metrics_of_a_job_that_are_not_valid(metrics: Any) -> None:
    with pytest.raises(JobError, match="metrics"):
        make_job(metrics=metrics)


def test_metrics_and_goals_need_validation_examples() -> None:
    goal = RunConfig.of(batch_size=1, train_steps=1, stop_metric="loss", keep_best=True)
    with pytest.raises(ConfigError, match="validation"):
        make_plan(make_job(), goal, 1)
    with pytest.raises(JobError, match="validation"):
        make_plan(make_job(metrics={"m": max}), RunConfig.of(batch_size=1, train_steps=1), 1)
    make_plan(make_job(validation=make_job().train), goal, 1)


@pytest.mark.parametrize(
    ("text", "goal"),
    [
        ("loss", Goal("loss", False)),
        ("accuracy", Goal("accuracy", True)),
        ("validation_loss", Goal("loss", False)),
        ("loss:max", Goal("loss", True)),
        ("auc:max", Goal("auc", True)),
    ],
)
def test_goals(text: str, goal: Goal) -> None:
    assert parse_goal("--sort", text) == goal


@pytest.mark.parametrize("text", ["auc", "auc:", "auc:best", "", ":max", "loss:"])
def test_goals_without_a_direction(text: str) -> None:
    with pytest.raises(ConfigError, match=":max"):
        parse_goal("--sort", text)


@pytest.mark.parametrize(
    "options",
    [
        {"patience": 2},
        {"keep_best": True},
        {"stop_metric": "loss"},
        {"stop_metric": "loss", "patience": 2, "validate_steps": 0},
        {"stop_metric": "loss", "patience": 0},
    ],
)
def test_options_that_have_no_effect(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        RunConfig.of(**options)


def stopped_at(hook: TrackBest, values: list[float], first: int = 1) -> list[int]:
    """Return the steps at which the hook ends training, if each step has a validation with the next of ``values``."""
    stopped: list[int] = []
    for step, value in enumerate(values, first):
        loop = SimpleNamespace(validation={"validation_m": value}, validation_step=step, measured_step=step)
        loop.stop = lambda reason, step=step: stopped.append(step)
        for _ in range(2):  # a point may be handled twice
            hook.at_consistent_point(loop, ConsistentPoint(step, 0, frozenset(), last=False))
    return stopped


@pytest.mark.parametrize(
    ("values", "best", "stop"),
    [
        ([1.0, 2.0, 1.5, 2.0, 2.5, 1.0, 1.0, 1.0], 5, 8),  # an equal value is no improvement
        ([math.nan, 0.0, math.nan, math.inf, 1.0, 1.0, 1.0], 4, 7),
        ([math.nan, math.nan, math.nan], -1, 3),
    ],
)
def test_patience(values: list[float], best: int, stop: int) -> None:
    hook = TrackBest(Goal("m", True), 3, keeps=True)
    assert stopped_at(hook, values) == [stop]
    assert hook.step == best
    assert [step for step in range(9) if hook.record(step) is not None] == [best] * (best > 0)
    for split in range(len(values)):
        before, after = TrackBest(Goal("m", True), 3, keeps=True), TrackBest(Goal("m", True), 3, keeps=True)
        stopped_at(before, values[:split])
        after.load_extra_state(before.extra_state())
        assert stopped_at(after, values[split:], split + 1) == [stop]
        assert after.step == best


def test_without_patience_training_continues() -> None:
    hook = TrackBest(Goal("m", False), None, keeps=False)
    assert stopped_at(hook, [1.0] * 9) == [] and hook.record(1) is None
    other = TrackBest(Goal("other", False), None, keeps=False)
    other.load_extra_state(hook.extra_state())
    assert other.step == -1, "the state of another metric is not used"


def test_totals_divide_by_what_counts() -> None:
    assert Totals.of_examples(6.0, 3, 4).means() == {"loss": 1.5, "accuracy": 0.75}
    assert Totals.of_examples(6.0, None, 4).means() == {"loss": 1.5}
    assert Totals(6.0, 0.5, 1, 2).means() == {"loss": 12.0, "accuracy": 0.5}
    with pytest.raises(JobError):
        Totals(0.0, 0.0).means()


def test_nan_is_never_the_best_value() -> None:
    goal = Goal("loss", is_higher_better=False)
    assert goal.is_better(2.0, None) and goal.is_better(1.0, 2.0) and not goal.is_better(2.0, 2.0)
    assert not goal.is_better(math.nan, None) and not goal.is_better(math.nan, 2.0)
