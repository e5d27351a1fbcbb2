"""Messages of the chief about a run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from mpitrain.plan.config import RunConfig
from mpitrain.plan.metric import Goal
from mpitrain.plan.progress import ConsistentPoint
from mpitrain.training.best import TrackBest
from mpitrain.training.messages import describe_job, notes_on_patience


def notes(
    train_steps: int, every: int, patience: int | None, every_s: float = 0.0, own_loop: bool = False
) -> list[str]:
    config = SimpleNamespace(training=SimpleNamespace(patience=patience, validate_secs=every_s))
    plan = SimpleNamespace(config=config, validate_steps=every, train_steps=train_steps)
    job = SimpleNamespace(network=SimpleNamespace(has_own_loop=own_loop))
    return notes_on_patience(job, plan)  # type: ignore[arg-type]


def ends_early(train_steps: int, every: int, patience: int) -> bool:
    """Return whether the hook ends a run early if all its validations have the same value of the metric."""
    stopped: list[str] = []
    best = TrackBest(Goal("loss", False), patience, keeps=False)
    for step in [*range(every, train_steps, every), train_steps]:
        loop = SimpleNamespace(
            validation={"validation_loss": 1.0}, validation_step=step, measured_step=step, stop=stopped.append
        )
        point = ConsistentPoint(step, 0, frozenset(), last=step == train_steps)
        best.at_consistent_point(loop, point)  # type: ignore[arg-type]
    return bool(stopped)


@pytest.mark.parametrize("patience", [1, 2, 3])
@pytest.mark.parametrize("every", [1, 3, 10])
def test_a_note_if_patience_has_no_effect(every: int, patience: int) -> None:
    for train_steps in range(1, 45):
        assert bool(notes(train_steps, every, patience)) is not ends_early(train_steps, every, patience), train_steps


def test_the_interval_that_the_note_gives_has_an_effect() -> None:
    [note] = notes(100, 50, 3)
    interval = next(int(word) for word in note.split("pass")[1].split() if word.isdecimal())
    assert ends_early(100, interval, 3) and not ends_early(100, interval + 1, 3)


def test_no_note_if_the_number_of_validations_is_unknown() -> None:
    assert not notes(100, 50, None) and not notes(100, 0, 3)
    assert not notes(100, 50, 3, every_s=1.0) and not notes(100, 50, 3, own_loop=True)


@pytest.mark.parametrize(
    ("join", "steps", "epochs"), [("run", 4311, "60 epochs"), ("run", 1500, "20.9 epochs"), (None, 575, "8 epochs")]
)
def test_a_learner_names_the_length_of_the_run(join: str | None, steps: int, epochs: str) -> None:
    """Not the length that it was asked for, 8 epochs."""
    config = RunConfig.of(train_epochs=8, join=None if join is None else Path(join))
    plan = SimpleNamespace(config=config, gradients_per_step=1, workers=1, batch=20, step_examples=20)
    plan.layout = SimpleNamespace(n_params=5)
    loop = SimpleNamespace(plan=plan, train_steps=steps, step=0)
    assert f"{epochs} until step {steps:,}" in describe_job(loop, range(1437), None)  # type: ignore[arg-type]
