"""The configurations that ``mpitrain tune`` compares, and the criteria: speed, and the value of a larger batch."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice, zip_longest
from typing import Any, NamedTuple

from ..errors import ConfigError
from ..plan.compression import codecs_of
from ..plan.config import FIELDS, RunConfig
from ..plan.modes import MODES, Mode, find_mode
from ..plan.option import info_of
from .measurements import Probe
from .scenario import Scenario, scenario_of
from .simulation import Prediction, check_simpy, predict

# Kinds of options that a user may permit to change, besides options without effect on the results.
CHANGES = tuple(dict.fromkeys(change for field in FIELDS.values() if (change := info_of(field).change)))
MOST = 40
_FACTORS = (0.5, 2, 4)  # of the batch size


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


class Impossible(NamedTuple):
    """A configuration that cannot be tried: the options in which it differs from the user's, and the reason."""

    options: Mapping[str, Any]
    reason: str


def parse_changes(text: str | None) -> frozenset[str]:
    """Return the changes that ``--may-change`` permits.

    Raises:
        ConfigError: A change is not valid.
    """
    changes = frozenset(text.split(",")) if text else frozenset()
    for change in sorted(changes - {*CHANGES}):
        raise ConfigError(f"--may-change {change}: must be {', '.join(CHANGES)}, separated by commas")
    return changes


def candidates(
    probe: Probe, run_options: Mapping[str, Any], changes: Collection[str]
) -> tuple[list[Candidate], list[Impossible]]:
    """Return the user's configuration and others on the probe's ranks, at most 40, the best first; and impossible ones.

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
    made, impossible = [], []
    for options in _differences(probe, run_options, changes):
        try:
            scenario = _scenario(probe, run_options, options)
            prediction = predict(probe, scenario, steps=100)
        except ConfigError as error:
            if not options:
                raise
            impossible.append(Impossible(options, str(error)))
            continue
        worth = worth_of_batch(scenario.batch * scenario.gradients_per_step, examples, probe.noise.scale_examples)
        made.append(Candidate(options, scenario, prediction, worth))
    return sorted(made, key=lambda candidate: -candidate.score), impossible


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
    own = find_mode(run_options.get("mode", "sync"))
    batch = run_options.get("batch_size") or probe.job.batch
    sizes = [{"batch_size": max(1, round(batch * factor))} for factor in _FACTORS if "batch" in changes]
    yield from _of_mode(probe, own, run_options, changes)
    for mode in MODES.values() if "mode" in changes else ():
        if mode.name != own.name:
            removed: dict[str, Any] = {name: None for name in run_options if not _is_valid_in(mode, name, run_options)}
            given = {name: value for name, value in run_options.items() if name not in removed}
            yield from ({**removed, "mode": mode.name, **options} for options in _of_mode(probe, mode, given, changes))
    for options in [{}, *_of_mode(probe, own, run_options, changes)]:
        yield from ({**options, **size} for size in sizes)


def _is_valid_in(mode: Mode, name: str, run_options: Mapping[str, Any]) -> bool:
    """Return whether another mode has an option of the user, with its value and the option that it requires."""
    required = info_of(FIELDS[name]).requires
    options = {key: run_options[key] for key in (name, required) if key in run_options}
    try:
        RunConfig.of(**{**options, "mode": mode.name})
    except ConfigError:
        return False
    return True


def _of_mode(
    probe: Probe, mode: Mode, run_options: Mapping[str, Any], changes: Collection[str]
) -> Iterator[dict[str, Any]]:
    """Yield the options of a mode that may differ from the user's, and their combinations."""
    nodes = len(probe.ranks.ranks_per_node)
    codecs = [codec for codec in probe.codecs if codec.partition(":")[0] in codecs_of(mode)]
    of_ranks = {"ps": (1, 2, nodes), "compress": codecs if nodes > 1 else []}
    needed = {"ps": 1} if mode.uses_servers and nodes > 1 and not run_options.get("ps") else {}
    combined: list[dict[str, Any]] = [needed]
    for name, field in FIELDS.items():
        info = info_of(field)
        if info.change is not None and (not info.change or info.change in changes) and info.is_tried_in(mode):
            values = of_ranks.get(name, info.tried)
            combined += [{**options, name: value} for options in combined for value in values]
    yield from combined
