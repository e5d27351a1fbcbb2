"""Simulate a scenario, and summarize it as a prediction."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

import numpy as np

from ..errors import ConfigError
from .measurements import Probe
from .rank_times import RankTimes
from .scenario import Scenario
from .timeline import Timeline

_MOST_GRADIENTS, _FEWEST_STEPS = 10_000, 6  # numbers in one simulation, which limit its duration


@dataclass(frozen=True)
class Prediction:
    """The predicted speed of a scenario.

    Attributes:
        steps_per_s: Steps per second; in ``async`` and ``ssp`` every gradient is a step.
        examples_per_s: Examples per second that the steps use.
        staleness: Mean number of steps between the parameters of a gradient and its use.
        dropped: Fraction of the computed gradients that are not used.
        sent_bytes_per_s: Bytes per second that the busiest node sends to others.
        efficiency: Examples per second relative to the same number of workers that never wait.
    """

    steps_per_s: float
    examples_per_s: float
    staleness: float
    dropped: float
    sent_bytes_per_s: float
    efficiency: float


def predict(probe: Probe, scenario: Scenario, steps: int = 300, seed: int = 0) -> Prediction:
    """Simulate at most this number of steps per worker, and return the predicted speed.

    Raises:
        ConfigError: The scenario cannot be simulated.
    """
    run = simulate(probe, scenario, steps, seed)
    times = RankTimes(probe, scenario)
    steps_per_s = run.steps_per_s
    examples_per_s = steps_per_s * scenario.batch * scenario.gradients_per_step
    alone_s = times.compute_s / times.stretch + times.update_s(1) / times.stretch + times.loop_s / times.stretch
    used = len(run.staleness)
    return Prediction(
        steps_per_s,
        examples_per_s,
        float(np.mean(run.staleness)) if run.staleness else 0.0,
        run.dropped / (run.dropped + used) if run.dropped else 0.0,
        float(run.sent.max()) / run.ends[-1],
        examples_per_s * alone_s / (scenario.batch * len(scenario.workers)),
    )


def check_simpy() -> None:
    """Check that modes with servers can be simulated.

    Raises:
        ConfigError: simpy is not installed.
    """
    if importlib.util.find_spec("simpy") is None:
        raise ConfigError("simpy is not installed; run pip install 'mpitrain[tune]'")


def simulate(probe: Probe, scenario: Scenario, steps: int, seed: int = 0, records: bool = False) -> Timeline:
    """Return the timeline of ``steps`` steps, fewer with many workers; in ``async`` and ``ssp``, steps per worker."""
    mode = scenario.config.mode
    if mode.uses_servers:
        check_simpy()
    workers = len(scenario.workers)
    steps = max(_FEWEST_STEPS, min(steps, _MOST_GRADIENTS // workers))
    if mode.is_asynchronous:
        steps *= workers
    run = Timeline(records)
    module = import_module(f".modes.{mode.simulation}", __package__)
    simulate_mode: Callable[..., None] = module.simulate
    simulate_mode(scenario, RankTimes(probe, scenario), steps, np.random.default_rng(seed), run)
    return run
