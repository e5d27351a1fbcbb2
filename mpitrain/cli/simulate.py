"""``mpitrain simulate``."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from ..core.files import writing
from ..core.words import counted
from ..errors import ConfigError
from ..monitor.format import amount, duration, format_table
from ..plan import options as flags
from ..plan.config import FIELDS, RunConfig
from ..plan.modes import MODES
from ..plan.option import info_of
from ..plan.options import flag_words
from ..predict.measurements import Probe, read_probe
from ..predict.scenario import Scenario, parse_rate, scenario_of, shaped
from ..predict.simulation import Failures, Prediction, predict, simulate, step_factors, time_with_failures
from ..predict.timeline import write_trace
from .help import help_all_option, write_options
from .job_command import given_options

_WORKERS_PER_SERVER = 8
_TRACED_STEPS = 20
_TRACED_RANKS = 256
_OF_RUNS = [option for option in flags.run_options() if info_of(FIELDS[str(option.name)]).is_simulated]
_COLUMNS = (
    "mode", "options", "nodes", "ranks", "steps/s", "examples/s", "efficiency", "staleness", "dropped", "MB/s per node",
)  # fmt: skip
_OF_LEARNERS = ("learners", "version every", "exchange")


@dataclass(frozen=True)
class Forecast:
    """A prediction and its configuration.

    Attributes:
        options: The options of the mode.
        seconds: The time to train on ``--examples`` examples; None without this option.
        goodput: The share of this time that goes into steps whose result is kept; None without ``--node-mtbf`` and
            ``--preempt``.
    """

    mode: str
    options: dict[str, Any]
    scenario: Scenario
    prediction: Prediction
    seconds: float | None
    goodput: float | None

    @property
    def n_runs(self) -> int:
        """The number of learners; 1 for a run that is no learner."""
        return self.scenario.learners or 1

    def as_mapping(self) -> dict[str, Any]:
        """Return the prediction as values for JSON."""
        scenario = self.scenario
        return {
            "mode": self.mode,
            "options": self.options,
            "learners": scenario.learners,
            "nodes": scenario.n_nodes * self.n_runs,
            "ranks": scenario.n_ranks * self.n_runs,
            "workers": len(scenario.workers) * self.n_runs,
            "batch": scenario.batch,
            "link_bytes_per_s": scenario.between.node_bytes_per_s,
            **dataclasses.asdict(self.prediction),
            "time_s": self.seconds,
            "goodput": self.goodput,
        }


def _option(name: str, kind: Any, metavar: str, help: str, **more: Any) -> click.Option:
    return click.Option([name], type=kind, metavar=metavar, help=help, **more)


_POSITIVE, _COUNT = click.FloatRange(0, min_open=True), click.IntRange(1)
_OWN = [
    _option("--nodes", flags.CommaSeparated(_COUNT), "N,...", "Numbers of nodes.  [those of the probe, doubled to 64]"),
    _option("--ranks-per-node", _COUNT, "R", "Ranks of each node.  [as in the probe]"),
    _option("--cores-per-node", _COUNT, "C", "Cores that these ranks share.  [one for each rank, or the probe's]"),
    _option("--learners", click.IntRange(1, 4096), "M", "Learners (run --join), each with its own such nodes."),
    _option("--link", str, "RATE", "Rate of a node's link, such as 25gbit.  [as in the probe]"),
    _option("--link-latency", _POSITIVE, "S", "Latency of the link in seconds.  [as in the probe]"),
    _option("--link-burst", click.FloatRange(0), "BYTES", "Bytes that a shaped link carries at once after a pause."),
    _option("--batch-size", _COUNT, "N", "Examples per worker and step.  [as in the probe]"),
    _option("--slow", str, "WORKER:FACTOR", "Multiply a worker's computing time by FACTOR; repeatable.", multiple=True),
    _option("--step-times", str, "TIMES", "measured, equal, lognormal:SIGMA, or a file of times.", default="measured"),
    _option("--examples", _COUNT, "N", "Also predict the time to train on N examples."),
    _option("--node-mtbf", _POSITIVE, "S", "With --examples: mean time between failures of a node."),
    _option("--save-secs", _POSITIVE, "S", "With --node-mtbf: time between checkpoints.", default=600.0),
    _option("--save-time", click.FloatRange(0), "S", "Time for which a save stops training.", default=0.0),
    _option("--restart-time", click.FloatRange(0), "S", "Time from a failure to the next step.", default=30.0),
    _option("--preempt", str, "S:AWAY", "With --examples: mean time between preemptions of a node, and time away."),
    _option("-o", flags.PATH, "FILE", "Also write the predictions as JSON."),
    _option("--plot", flags.PATH, "FILE", "Draw examples/s against ranks: FILE.png or FILE.svg."),
    _option("--trace", flags.PATH, "FILE", "Write the simulated timeline of one prediction, as --trace of a run."),
]  # fmt: skip


for _name in ("--link-latency", "--link-burst", "--save-secs", "--save-time", "--restart-time", "--preempt"):
    next(option for option in _OWN if _name in option.opts).is_common = False  # type: ignore[attr-defined]


class _Simulate(click.Command):
    """``mpitrain simulate``; its help shows the common options, or all."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        write_options(ctx, formatter, [param for param in self.get_params(ctx) if isinstance(param, click.Option)])


def simulate_command() -> click.Command:
    """Return ``mpitrain simulate``, which predicts the speed of other configurations from a probe."""
    about = (
        "Predict the speed of a job on other ranks, links and modes, from PROBE, a file of mpitrain probe. Without "
        "--mode, all modes are predicted. On several nodes, modes with servers have one for every 8 ranks by default."
    )
    probe = click.Argument(["probe"], type=flags.PATH, metavar="PROBE")
    examples = flags.examples(
        "mpitrain simulate probe.json --nodes 1,8,64 --link 25gbit",
        "mpitrain simulate probe.json --mode backup --ps 2 --slow 3:2 --nodes 4",
    )
    params = [*_OWN, *_OF_RUNS, help_all_option(), probe]
    return _Simulate("simulate", params=params, callback=_simulate, help=about, epilog=examples)


def _simulate(probe: Path, **values: Any) -> int:
    measured = read_probe(probe)
    measured = dataclasses.replace(measured, step_factors=step_factors(values["step_times"], measured))
    given = given_options(_OF_RUNS, values)
    _check(values, given)
    problems: dict[str, str] = {}
    scenarios = list(_scenarios(measured, values, given, problems))
    if values["trace"] is not None:
        _check_traced([scenario for _, _, scenario in scenarios])
    forecasts = [_forecast(measured, values, scenario, mode, options) for mode, options, scenario in scenarios]
    click.echo(table(forecasts))
    for what, problem in problems.items():
        click.echo(f"not predicted: {what}: {problem}")
    if values["o"] is not None:
        text = json.dumps([forecast.as_mapping() for forecast in forecasts], indent=1)
        with writing(values["o"], "-o"):
            values["o"].write_text(f"{text}\n", encoding="utf-8")
    if values["plot"] is not None:
        _plot(values["plot"], measured, forecasts)
    if values["trace"] is not None:
        scenario = forecasts[0].scenario
        run = simulate(measured, scenario, _TRACED_STEPS, records=True)
        with writing(values["trace"], "--trace"):
            write_trace(values["trace"], scenario, run)
    return 0


def _check(values: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Check options that need other options, and ``--plot``.

    Raises:
        ConfigError: An option has no effect or is not valid in any mode, or ``--plot`` cannot be written.
    """
    for name in ("node_mtbf", "preempt"):
        if values[name] is not None and values["examples"] is None:
            raise ConfigError(f"--{name.replace('_', '-')} has no effect without --examples N; add it")
    for name in ("save_secs", "save_time", "restart_time"):
        if values["node_mtbf"] is None and name in given_options(_OWN, values):
            raise ConfigError(f"--{name.replace('_', '-')} has no effect without --node-mtbf S; add it")
    if values["learners"] is not None:
        if (mode := given.get("mode", "sync")) != "sync":
            raise ConfigError(f"--learners requires --mode sync, but the mode is {mode}; remove one")
        for name in ("save_secs", "save_time", "trace"):
            if name in given_options(_OWN, values):
                raise ConfigError(f"--{name.replace('_', '-')} has no effect with --learners; remove one")
    if values["plot"] is not None:
        if values["plot"].suffix not in (".png", ".svg"):
            raise ConfigError(f"--plot {values['plot']}: must end with .png or .svg")
        if importlib.util.find_spec("matplotlib") is None:
            raise ConfigError("--plot: matplotlib is not installed; run pip install 'mpitrain[tune]'")
    if values["link"] is None and values["link_burst"] is not None:
        raise ConfigError("--link-burst has no effect without --link RATE; add it")
    for name in given:
        if "mode" not in given and not any(info_of(FIELDS[name]).is_valid_in(mode) for mode in MODES.values()):
            raise ConfigError(f"--{name.replace('_', '-')} is not valid in any mode")


def _scenarios(
    probe: Probe, values: Mapping[str, Any], given: Mapping[str, Any], problems: dict[str, str]
) -> Iterator[tuple[str, dict[str, Any], Scenario]]:
    """Yield mode, options and scenario of each prediction.

    Args:
        problems: Set to the reasons why modes that the user has not named cannot be predicted, by mode and nodes.

    Raises:
        ConfigError: No prediction is possible.
    """
    count = 0
    if values["learners"] is not None:
        given = {"mode": "sync", **given}
    for mode in [given["mode"]] if "mode" in given else MODES:
        for nodes in _numbers_of_nodes(probe, values):
            try:
                options = _options(mode, given, probe, values, nodes)
                join = {} if values["learners"] is None else {"join": Path("RUN")}
                scenario = _scenario(probe, values, RunConfig.of(**options, **join), nodes)
            except ConfigError as error:
                if "mode" in given:
                    raise
                problems[f"{mode} on {counted(nodes, 'node')}"] = str(error)
                continue
            count += 1
            yield mode, {name: value for name, value in options.items() if name != "mode"}, scenario
    if not count:
        raise ConfigError(next(iter(problems.values())))


def _numbers_of_nodes(probe: Probe, values: Mapping[str, Any]) -> list[int]:
    """Return the numbers of nodes to predict.

    Raises:
        ConfigError: There are several nodes, but the links between them have not been measured.
    """
    has_link = probe.between is not None or values["link"] is not None
    nodes = values["nodes"] or (_doubled(len(probe.ranks.ranks_per_node)) if has_link else [1])
    if (max(nodes) > 1 or values["learners"] is not None) and not has_link:
        given = f"--nodes {max(nodes)}" if values["learners"] is None else f"--learners {values['learners']}"
        raise ConfigError(f"{given}: the probe has measured one host only; add --link RATE, such as 10gbit")
    return list(nodes)


def _doubled(nodes: int) -> list[int]:
    return [nodes << shift for shift in range(12) if nodes << shift <= max(64, nodes)]


def _options(
    mode: str, given: Mapping[str, Any], probe: Probe, values: Mapping[str, Any], nodes: int
) -> dict[str, Any]:
    """Return the options of a mode: the user's options that are valid in it, and servers on several nodes."""
    if "mode" in given:
        options = dict(given)
    else:
        options = {name: value for name, value in given.items() if info_of(FIELDS[name]).is_valid_in(MODES[mode])}
        options["mode"] = mode
    if MODES.get(mode) is not None and MODES[mode].uses_servers and nodes > 1 and "ps" not in options:
        ranks = nodes * (values["ranks_per_node"] or max(probe.ranks.ranks_per_node))
        options["ps"] = max(1, ranks // _WORKERS_PER_SERVER)
    return options


def _scenario(probe: Probe, values: Mapping[str, Any], config: RunConfig, nodes: int) -> Scenario:
    ranks = values["ranks_per_node"] or max(probe.ranks.ranks_per_node)
    scenario = scenario_of(probe, config, (ranks,) * nodes, values["batch_size"])
    link = scenario.between
    if values["link"] is not None:
        link = shaped(link, parse_rate(values["link"]), values["link_burst"] or 0.0)
    if values["link_latency"] is not None:
        link = dataclasses.replace(link, latency_s=values["link_latency"])
    cores = values["cores_per_node"] or max(ranks, probe.ranks.cores_per_node)
    changes = {"between": link, "cores_per_node": cores, "learners": values["learners"], "slow": _slow(values["slow"])}
    return dataclasses.replace(scenario, **changes)


def _slow(texts: Sequence[str]) -> dict[int, float]:
    """Return the factor of each slow worker's computing time, by worker.

    Raises:
        ConfigError: A text is not WORKER:FACTOR with a factor above 0.
    """
    slow = {}
    for text in texts:
        match = re.fullmatch(r"(\d+):(\d+(?:\.\d*)?)", text)
        if match is None or not float(match[2]):
            raise ConfigError(f"--slow {text}: must be WORKER:FACTOR with a factor above 0, such as 3:2.5")
        slow[int(match[1])] = float(match[2])
    return slow


def _failures(values: Mapping[str, Any], prediction: Prediction) -> Failures:
    """Return the failures of a run, or of each learner, which loses what it has not contributed.

    Raises:
        ConfigError: ``--preempt`` is not S:AWAY with S above 0.
    """
    every_s, away_s = math.inf, 0.0
    if values["preempt"] is not None:
        match = re.fullmatch(r"(\d+(?:\.\d*)?):(\d+(?:\.\d*)?)", values["preempt"])
        if match is None or not float(match[1]):
            raise ConfigError(
                f"--preempt {values['preempt']}: must be S:AWAY, two numbers of seconds, S above 0, such as 3600:300"
            )
        every_s, away_s = float(match[1]), float(match[2])
    save_every_s, save_s = values["save_secs"], values["save_time"]
    if (exchanges := prediction.exchanges) is not None:
        save_s = exchanges.pause * exchanges.kept_every_s
        save_every_s = exchanges.kept_every_s - save_s
    return Failures(values["node_mtbf"] or math.inf, save_every_s, save_s, values["restart_time"], every_s, away_s)


def _forecast(
    probe: Probe, values: Mapping[str, Any], scenario: Scenario, mode: str, options: dict[str, Any]
) -> Forecast:
    prediction = predict(probe, scenario)
    seconds = goodput = None
    if values["examples"] is not None:
        seconds = steps_s = values["examples"] / prediction.examples_per_s
        if values["node_mtbf"] is not None or values["preempt"] is not None:
            if prediction.exchanges is not None:
                steps_s *= 1 - prediction.exchanges.pause
            seconds = time_with_failures(steps_s, scenario.n_nodes, _failures(values, prediction))
            goodput = steps_s / seconds
    return Forecast(mode, options, scenario, prediction, seconds, goodput)


def table(forecasts: Sequence[Forecast]) -> str:
    """Return the predictions as a table."""
    columns, rows = list(_COLUMNS), []
    columns += ["time"] if any(forecast.seconds is not None for forecast in forecasts) else []
    columns += ["goodput"] if any(forecast.goodput is not None for forecast in forecasts) else []
    columns += list(_OF_LEARNERS) if any(forecast.prediction.exchanges for forecast in forecasts) else []
    for forecast in forecasts:
        prediction, scenario = forecast.prediction, forecast.scenario
        row = [
            forecast.mode,
            " ".join(flag_words(forecast.options)),
            f"{scenario.n_nodes * forecast.n_runs:,}",
            f"{scenario.n_ranks * forecast.n_runs:,}",
            f"{prediction.steps_per_s:,.4g}" if prediction.steps_per_s < 1000 else amount(prediction.steps_per_s),
            amount(prediction.examples_per_s),
            f"{100 * prediction.efficiency:.0f} %",
            f"{prediction.staleness:.1f}",
            f"{100 * prediction.dropped:.0f} %",
            f"{prediction.sent_bytes_per_s / 1e6:,.1f}",
        ]
        row += [] if forecast.seconds is None else [duration(forecast.seconds)]
        row += [] if forecast.goodput is None else [f"{100 * forecast.goodput:.0f} %"]
        if (exchanges := prediction.exchanges) is not None:
            sent = f"{exchanges.nbytes / 1e6:,.1f} MB in {exchanges.transfer_s:,.2g} s"
            row += [f"{forecast.n_runs:,}", f"{exchanges.version_s:,.2f} s", sent]
        rows.append(row)
    return format_table(columns, rows)


def _plot(path: Path, probe: Probe, forecasts: Sequence[Forecast]) -> None:
    from ..report.images import SpeedCurve, write_scaling

    curves: dict[str, list[tuple[float, float]]] = {}
    for forecast in forecasts:
        curves.setdefault(forecast.mode, []).append(
            (forecast.scenario.n_ranks * forecast.n_runs, forecast.prediction.examples_per_s)
        )
    first = forecasts[0]
    alone = first.prediction.examples_per_s / first.prediction.efficiency / (len(first.scenario.workers) * first.n_runs)
    shown = [SpeedCurve(name, tuple(points)) for name, points in curves.items()]
    with writing(path, "--plot"):
        write_scaling(path, f"{probe.job.name}: predicted speed", shown, alone)


def _check_traced(scenarios: Sequence[Scenario]) -> None:
    """Check that a timeline can be written.

    Raises:
        ConfigError: There are several predictions, or too many ranks.
    """
    if len(scenarios) > 1 or scenarios[0].n_ranks > _TRACED_RANKS:
        raise ConfigError(
            f"--trace needs one prediction of at most {_TRACED_RANKS} ranks, but there are {len(scenarios)} with up to "
            f"{max(scenario.n_ranks for scenario in scenarios)} ranks: give --mode and one number of --nodes"
        )
