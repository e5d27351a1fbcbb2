"""Simulate a scenario, and summarize it as a prediction; draw times of steps and failures."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..errors import ConfigError
from .measurements import Probe
from .rank_times import RankTimes
from .scenario import Scenario
from .timeline import Timeline

if TYPE_CHECKING:
    from .learners import Exchanges

_MOST_GRADIENTS, _FEWEST_STEPS = 10_000, 6  # numbers in one simulation, which limit its duration
_RUNS, _MOST_FAILURES = 200, 100_000  # runs whose mean time is predicted, and failures of each
_QUANTILES = 500  # of a distribution of step times


@dataclass(frozen=True)
class Prediction:
    """The predicted speed of a scenario.

    Attributes:
        steps_per_s: Steps per second; in ``async`` and ``ssp`` every gradient is a step.
        examples_per_s: Examples per second that the steps use.
        staleness: Mean number of steps between the parameters of a gradient and its use; of learners, of versions of
            the common parameters between that on which a contribution is based and its use.
        dropped: Fraction of the computed gradients that are not used.
        sent_bytes_per_s: Bytes per second that the busiest node sends to others.
        efficiency: Examples per second relative to the same number of workers that never wait.
        exchanges: The exchanges of learners; None for a run that is no learner.
    """

    steps_per_s: float
    examples_per_s: float
    staleness: float
    dropped: float
    sent_bytes_per_s: float
    efficiency: float
    exchanges: Exchanges | None = None


def predict(probe: Probe, scenario: Scenario, steps: int = 300, seed: int = 0) -> Prediction:
    """Simulate at most this number of steps per worker, and return the predicted speed.

    Raises:
        ConfigError: The scenario cannot be simulated.
    """
    if scenario.learners is not None:
        return _predict_learners(probe, scenario, scenario.learners, steps, seed)
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


def _predict_learners(probe: Probe, scenario: Scenario, learners: int, steps: int, seed: int) -> Prediction:
    """Return the predicted speed of all learners together. Each one is predicted as a run of its own."""
    from .learners import exchange  # loads the numerical code of the strategy, which other predictions do not need

    slow: dict[int, dict[int, float]] = {}
    for worker, factor in scenario.slow.items():
        learner, index = divmod(worker, len(scenario.workers))
        slow.setdefault(learner, {})[index] = factor
    one = dataclasses.replace(scenario, learners=None, slow={})
    usual = predict(probe, one, steps, seed)
    speeds = np.full(learners, usual.steps_per_s)
    for learner, factors in slow.items():
        speeds[learner] = predict(probe, dataclasses.replace(one, slow=factors), steps, seed).steps_per_s
    exchanges, age = exchange(one, RankTimes(probe, one), speeds, np.random.default_rng(seed))
    total = float(speeds.sum()) / usual.steps_per_s * (1 - exchanges.pause)  # number of usual learners without pauses
    steps_per_s, examples_per_s = usual.steps_per_s * total, usual.examples_per_s * total
    sent, efficiency = usual.sent_bytes_per_s + exchanges.sent_bytes_per_s, usual.efficiency * total / learners
    return Prediction(steps_per_s, examples_per_s, age, 0.0, sent, efficiency, exchanges)


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


@dataclass(frozen=True)
class Failures:
    """The rate of failures and preemptions, and their cost.

    A learner's contributions are its checkpoints: if it fails, its other work is lost.

    Attributes:
        mean_time_s: Mean time between two failures of one node; these times are exponentially distributed.
        save_every_s: Time between two checkpoints.
        save_s: Time for which training stops to save a checkpoint.
        restart_s: Time from a failure until training continues from the newest checkpoint.
        preempted_every_s: Mean time between two preemptions of one node, before which the run saves; likewise.
        away_s: Time from a preemption until training continues.
    """

    mean_time_s: float
    save_every_s: float
    save_s: float = 0.0
    restart_s: float = 30.0
    preempted_every_s: float = math.inf
    away_s: float = 0.0


def time_with_failures(work_s: float, nodes: int, failures: Failures, seed: int = 0) -> float:
    """Return the mean time of runs that need ``work_s`` without checkpoints and failures.

    Raises:
        ConfigError: Nodes fail so often that training does not advance.
    """
    random = np.random.default_rng(seed)
    return float(np.mean([_one_run(work_s, nodes, failures, random) for _ in range(_RUNS)]))


def _one_run(work_s: float, nodes: int, failures: Failures, random: np.random.Generator) -> float:
    """Return the time of one run."""
    saved = elapsed = 0.0
    preemptions = nodes / failures.preempted_every_s
    rate = nodes / failures.mean_time_s + preemptions
    for _ in range(_MOST_FAILURES):
        until_failure = random.exponential(1 / rate)
        left = work_s - saved
        n_saves = int(left / failures.save_every_s)
        needed = left + n_saves * failures.save_s
        if until_failure >= needed:
            return elapsed + needed
        period = failures.save_every_s + failures.save_s
        saved += int(until_failure / period) * failures.save_every_s
        elapsed += until_failure
        if preemptions and random.random() * rate < preemptions:
            saved += min(until_failure % period, failures.save_every_s)
            elapsed += failures.away_s
        else:
            elapsed += failures.restart_s
    raise ConfigError(
        f"nodes fail every {1 / rate:.3g} s on average, which is before the next checkpoint: "
        f"save, or with --learners exchange (--local-steps), more often than every {failures.save_every_s:.4g} s"
    )


def step_factors(text: str, probe: Probe) -> tuple[float, ...]:
    """Return the factors of the compute time from which the factors of steps are drawn.

    Args:
        text: ``measured``, ``equal``, ``lognormal:SIGMA``, or the path of a file with one time of a step in each line.

    Raises:
        ConfigError: The text is none of these.
    """
    name, _, number = text.partition(":")
    if text == "measured":
        return probe.step_factors
    if text == "equal":
        return (1.0,)
    if name == "lognormal":
        return _lognormal(text, number)
    try:
        times = np.array(Path(text).read_text(encoding="utf-8").split(), np.float64)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--step-times {text}: must be measured, equal, lognormal:SIGMA, or a file with one time in each line"
        ) from error
    if not len(times) or not (times > 0).all():
        raise ConfigError(f"--step-times {text}: the file must have times above 0, one in each line")
    return tuple((times / np.median(times)).tolist())


def _lognormal(text: str, number: str) -> tuple[float, ...]:
    try:
        sigma = float(number)
    except ValueError:
        sigma = -1.0
    if not 0 <= sigma < 5:
        raise ConfigError(f"--step-times {text}: SIGMA must be a number >= 0 and < 5, such as lognormal:0.2")
    normal = np.sort(np.random.default_rng(0).standard_normal(_QUANTILES))
    return tuple(np.exp(sigma * normal).tolist())
