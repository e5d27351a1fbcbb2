"""The configurations that ``mpitrain tune`` compares, and the criteria: speed, and the value of a larger batch."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice, zip_longest
from typing import Any

from ..errors import ConfigError
from ..plan.config import RunConfig
from ..plan.modes import MODES
from .measurements import Probe
from .scenario import Scenario, scenario_of
from .simulation import Prediction, check_simpy, predict

# Kinds of options that a user may permit to change, besides options without effect on the results.
CHANGES = ("batch", "mode", "compression", "servers", "staleness", "local-steps")
MOST = 40
_BUCKETS = (1 << 18, 1 << 20, 1 << 22, 1 << 24)
_LOCAL_STEPS = (8, 32)
_STALENESS = (1, 3, 8)


@dataclass(frozen=True)
class Candidate:
    """A configuration that can be chosen.

    Attributes:
        options: The options of the run in which the configuration differs from the user's.
        scenario: The scenario of the prediction.
        prediction: Its predicted speed.
        worth: Progress per example, relative to the user's configuration, by the noise scale. It is 1 if the number of
            examples per step is the same.
    """

    options: Mapping[str, Any]
    scenario: Scenario
    prediction: Prediction
    worth: float

    @property
    def score(self) -> float:
        """Predicted progress per second, as examples/s of the user's configuration that make the same progress."""
        return self.prediction.examples_per_s * self.worth


def parse_changes(text: str | None) -> frozenset[str]:
    """Return the changes that ``--may-change`` permits.

    Raises:
        ConfigError: A change is not valid.
    """
    changes = frozenset(text.split(",")) if text else frozenset()
    for change in sorted(changes - {*CHANGES}):
        raise ConfigError(f"--may-change {change}: must be {', '.join(CHANGES)}, separated by commas")
    return changes


def candidates(probe: Probe, run_options: Mapping[str, Any], changes: Collection[str]) -> list[Candidate]:
    """Return the user's configuration and others that are possible on the probe's ranks, at most 40, the best first.

    Args:
        run_options: The options of the run that the user has given.
        changes: Kinds of options that may change, besides options without an effect on the results.

    Raises:
        ConfigError: The user's configuration cannot be predicted, or simpy is not installed.
    """
    own = _scenario(probe, run_options, {})
    if "mode" in changes:
        check_simpy()
    examples = own.batch * own.gradients_per_step
    made = []
    for options in _differences(probe, run_options, changes):
        try:
            scenario = _scenario(probe, run_options, options)
            prediction = predict(probe, scenario, steps=100)
        except ConfigError:
            if not options:
                raise
            continue
        worth = worth_of_batch(scenario.batch * scenario.gradients_per_step, examples, probe.noise.scale_examples)
        made.append(Candidate(options, scenario, prediction, worth))
    return sorted(made, key=lambda candidate: -candidate.score)


def worth_of_batch(examples: int, reference: int, noise_scale: float) -> float:
    """Return the progress of an example in steps of ``examples`` relative to steps of ``reference`` examples.

    Training to a loss needs a number of examples that is proportional to the batch plus the noise scale (McCandlish et
    al. 2018, equation 2.11). Without a noise scale, all steps are assumed to make the same progress.
    """
    return (reference + noise_scale) / (examples + noise_scale)


def _scenario(probe: Probe, run_options: Mapping[str, Any], options: Mapping[str, Any]) -> Scenario:
    merged = {**run_options, **options}
    config = RunConfig.of(**{name: value for name, value in merged.items() if value is not None})
    return scenario_of(probe, config, batch=config.training.batch_size)


def _differences(probe: Probe, run_options: Mapping[str, Any], changes: Collection[str]) -> Iterator[dict[str, Any]]:
    """Yield at most ``MOST`` sets of options, from each mode and batch size in turn; the first one is empty."""
    seen: list[dict[str, Any]] = []
    of_kind: dict[tuple[Any, Any], list[dict[str, Any]]] = {}
    for options in _all_differences(probe, run_options, changes):
        if options not in seen:
            seen.append(options)
            of_kind.setdefault((options.get("mode"), options.get("batch_size")), []).append(options)
    in_turn = (options for turn in zip_longest(*of_kind.values()) for options in turn if options is not None)
    yield from islice(in_turn, MOST)


def _all_differences(
    probe: Probe, run_options: Mapping[str, Any], changes: Collection[str]
) -> Iterator[dict[str, Any]]:
    yield {}
    own = run_options.get("mode", "sync")
    batch = run_options.get("batch_size") or probe.job.batch
    for options in _of_mode(probe, own, run_options, changes):
        yield options
    if "mode" in changes:
        for mode in MODES:
            if mode != own:
                # Options of the user's mode are not valid in other modes.
                removed = {name: None for name in _OF_ONE_MODE if name in run_options}
                yield from ({**removed, "mode": mode, **options} for options in _of_mode(probe, mode, {}, changes))
    if "batch" in changes:
        for factor in (0.5, 2, 4):
            yield {"batch_size": max(1, round(batch * factor))}
        for options in _of_mode(probe, own, run_options, changes):
            yield from ({**options, "batch_size": max(1, round(batch * factor))} for factor in (0.5, 2, 4))


_OF_ONE_MODE = """
    ps ps_placement staleness backup_workers local_steps outer_optimizer compress compress_after
""".split()


def _of_mode(
    probe: Probe, name: str, run_options: Mapping[str, Any], changes: Collection[str]
) -> Iterator[dict[str, Any]]:
    """Yield the options of a mode that may differ from the user's."""
    mode, nodes = MODES[name], len(probe.ranks.ranks_per_node)
    bases: list[dict[str, Any]] = [{}]
    if mode.uses_servers and not run_options.get("ps"):
        bases = [{"ps": 1}] if nodes > 1 else [{}]
    if mode.uses_servers and "servers" in changes:
        bases += [{"ps": count} for count in (1, 2, nodes)]
    if mode.bounds_staleness and "staleness" in changes:
        bases = [{**base, "staleness": bound} for base in bases for bound in _STALENESS]
    if mode.averages_params and "local-steps" in changes:
        bases += [{"local_steps": steps} for steps in _LOCAL_STEPS]
        bases += [{"local_steps": steps, "outer_optimizer": "nesterov"} for steps in _LOCAL_STEPS]
    yield from bases
    if mode.averages_gradients:
        yield from ({**base, "bucket_bytes": size} for base in bases for size in _BUCKETS)
    if nodes > 1 and "compression" in changes:
        for codec in probe.codecs:
            if codec.partition(":")[0] in mode.compressions:
                yield from ({**base, "compress": codec} for base in bases)
