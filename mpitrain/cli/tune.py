"""``mpitrain tune``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from ..api.tuning import Measured, Tuning, flags_of, tune
from ..core.files import writing
from ..launcher.terminal import say
from ..monitor.format import amount, format_table
from ..plan import options as flags
from ..plan.config import plain
from ..plan.option import flag
from ..predict.candidates import CHANGES, parse_changes
from .job_command import JobCommand, current_command
from .probe import launch_flags, launch_options

_LEAST_GAIN = 1.05  # minimum ratio of the best score to that of the user's configuration for a change


def tune_command() -> JobCommand:
    """Return ``mpitrain tune``, which chooses options of a job by prediction and measurement."""
    own = [
        click.Option(
            ["--may-change"],
            metavar="WHAT,...",
            help=f"Options that tune may change; the results then differ: {', '.join(CHANGES)}.  [default: nothing]",
        ),
        click.Option(
            ["--seconds"],
            type=click.FloatRange(1),
            default=5.0,
            metavar="S",
            help="Time of each measurement.  [default: 5]",
        ),
        click.Option(["-o", "--output"], type=flags.PATH, metavar="FILE", help="Also write the result as JSON."),
    ]
    about = (
        "Measure a job, predict the configurations that are possible on these ranks, run the best ones for some "
        "seconds, and print flags; usually in less than 3 minutes. The given options are the starting point."
    )
    examples = ["mpitrain tune -n 2 jobs/mnist_mlp.py", "mpitrain tune -n 2 --may-change batch,mode jobs/mnist_mlp.py"]
    return JobCommand("tune", [*launch_flags(), *own], _tune, about, examples)


def _tune(may_change: str | None, seconds: float, output: Path | None, **values: Any) -> int:
    changes = parse_changes(may_change)
    result = tune(launch_options(values), current_command().job_request(values), changes, seconds, say)
    click.echo(describe(result))
    if output is not None:
        with writing(output, "-o"):
            output.write_text(json.dumps(as_mapping(result), indent=1) + "\n", encoding="utf-8")
    return 0


def as_mapping(result: Tuning) -> dict[str, Any]:
    """Return the result for JSON: the predictions and measurements, and the options to use, empty for no change."""
    rates = {id(one.candidate): one.examples_per_s for one in result.measured}
    return {
        "use": plain(chosen(result).candidate.options),
        "configurations": [
            {
                "options": plain(candidate.options),
                "predicted_examples_per_s": candidate.prediction.examples_per_s,
                "measured_examples_per_s": rates.get(id(candidate)),
                "worth": candidate.worth,
            }
            for candidate in result.candidates
        ],
        "impossible": [{"options": plain(options), "reason": reason} for options, reason in result.impossible],
        "noise_scale_examples": result.probe.noise.scale_examples,
    }


def chosen(result: Tuning) -> Measured:
    """Return the best configuration if its score is at least 1.05 times that of the user's, else the user's."""
    own, best = result.measured[0], result.best
    return best if best.score >= _LEAST_GAIN * own.score else own


def describe(result: Tuning) -> str:
    """Return the measurements as a table, and the advice."""
    rows = [
        (
            " ".join(flags_of(one.candidate)) or "as given",
            amount(one.candidate.prediction.examples_per_s),
            amount(one.examples_per_s),
            f"{one.candidate.worth:.2f}",
            f"{100 * one.candidate.prediction.efficiency:.0f} %",
        )
        for one in result.measured
    ]
    table = format_table(("options", "predicted examples/s", "measured", "progress per example", "efficiency"), rows)
    left_out = "".join(f"\nnot possible: {' '.join(flags_of(one))}: {one.reason}" for one in result.impossible)
    return f"{len(result.candidates)} configurations were predicted{left_out}\n\n{table}\n\n{advice(result)}"


def advice(result: Tuning) -> str:
    """Return the flags to use, and why."""
    own, best = result.measured[0], chosen(result)
    if best is own:
        return "keep the given options: no other configuration was at least 5 % faster"
    options = best.candidate.options
    removed = [flag(name) for name, value in options.items() if value is None]
    use = f"use: {' '.join(flags_of(best.candidate))}{f'; remove: {chr(32).join(removed)}' if removed else ''}"
    text = f"{use}\n{_reason(own, best)}"
    batches = [one.candidate.scenario.batch * one.candidate.scenario.gradients_per_step for one in (own, best)]
    if batches[0] != batches[1]:
        noise = result.probe.noise.scale_examples
        text += (
            f"\na step uses {batches[1]:,} examples in place of {batches[0]:,}; at a gradient noise scale of "
            f"{amount(noise)} examples each example makes {best.candidate.worth:.2f} times the progress (measured "
            f"after {result.probe.noise.steps:,} steps; the noise scale grows during training)"
        )
    if set(best.candidate.options) - {"bucket_bytes"}:
        text += "\nthe results differ from those of the given configuration: compare the loss of both"
    return text


def _reason(own: Measured, best: Measured) -> str:
    """Return why a configuration is faster."""
    before, after = own.candidate.prediction, best.candidate.prediction
    text = (
        f"{best.examples_per_s / own.examples_per_s:.2f} times the speed: its predicted efficiency is "
        f"{100 * after.efficiency:.0f} % in place of {100 * before.efficiency:.0f} %"
    )
    if before.sent_bytes_per_s:
        of_example = [p.sent_bytes_per_s / p.examples_per_s for p in (before, after)]
        text += f", and a node sends {of_example[1] / of_example[0]:.2f} times the bytes for each example"
    return text
