"""``mpitrain data``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
import numpy as np

from ..data.trees import describe, leaves
from ..monitor.console import print_wrapped
from ..monitor.format import amount, size_of
from ..plan.job import errors_located
from .job_command import JobCommand, job_file_request

if TYPE_CHECKING:
    from ..training.data_survey import Speed, SplitFacts

_WIDEST_TEXT = 60


def _data(n: int, seconds: float, quick: bool, **values: Any) -> int:
    from ..training.data_survey import facts_of, measure

    request = job_file_request(values)
    job = request.make()
    with errors_located(request.job_file, job):
        dtype = np.dtype(request.config.training.dtype)
        splits = [facts_of(name, split, job.network, dtype, quick) for name, split in job.splits.items()]
        for split in splits:
            print_wrapped("\n".join(describe_split(split)) + "\n", error=False)
        speed = measure(job, request.config, n, seconds)
    training = request.config.training
    lines = describe_speed(speed, splits, n, training.n_data_workers, training.batches_ahead)
    print_wrapped("\n".join(lines), error=False)
    return 0


def data_command() -> JobCommand:
    """Return ``mpitrain data``, which shows a job's examples and measures how fast they are loaded."""
    own = [
        click.Option(["-n"], type=click.IntRange(1), default=1, metavar="RANKS", help="Ranks on this machine. [1]"),
        click.Option(
            ["--seconds"],
            type=click.FloatRange(0, min_open=True),
            default=3.0,
            metavar="S",
            help="Time for measuring loading, and for measuring computing. [3]",
        ),
        click.Option(["--quick"], is_flag=True, help="Compare some shards and row groups, not all."),
    ]
    about = "Show a job's examples, the memory they need, and whether loading or computing limits the speed."
    return JobCommand("data", own, _data, about, ["mpitrain data -n 2 jobs/mnist_mlp.py"])


def describe_split(facts: SplitFacts) -> list[str]:
    """Return lines about the examples of a split."""
    where = "loaded one by one" if facts.bytes is None else f"{size_of(facts.bytes)}, in memory once per node"
    lines = [f"{facts.name}: {facts.count:,} examples of {facts.source}, {where}"]
    if facts.note is not None:
        lines.append(f"  {facts.note}")
    if facts.columns:
        lines.append("  columns: " + ", ".join(f"{name} {kind}" for name, kind in facts.columns.items()))
    if facts.name == "training":
        lines.append(f"  order: {facts.order}")
    if facts.labels is not None:
        part = "" if facts.labelled == facts.count else f" of the first {facts.labelled:,}"
        names = dict(enumerate(facts.class_names))
        counts = (f"{label}{_in_brackets(names.get(label), label)}: {n:,}" for label, n in facts.labels.items())
        lines.append(f"  labels{part}: " + ", ".join(counts))
    for index, tree in enumerate(facts.examples):
        lines.append(f"  example {index}: {describe(tree)}  {_values(tree)}")
    return lines


def describe_speed(speed: Speed, splits: list[SplitFacts], ranks: int, workers: int, prefetch: int) -> list[str]:
    """Return lines about memory and speed, and advice."""
    shared = sum(split.bytes or 0 for split in splits)
    ahead = 0 if splits[0].bytes is not None else (workers * prefetch + 2) * speed.batch_bytes * ranks
    lines = [
        f"memory per node with {ranks} ranks: {size_of(shared)} of examples, {size_of(ahead)} of batches",
        f"one rank, batches of {speed.batch} examples, {size_of(speed.batch_bytes)}, {speed.threads} threads:",
        f"  loading    {amount(speed.loading):>12} examples/s in one process",
        f"  computing  {amount(speed.computing):>12} examples/s, forward and backward pass",
    ]
    if not speed.data_workers:
        return [*lines, "computing limits the speed: data workers would not increase it"]
    alone = 1 / (1 / speed.loading + 1 / speed.computing)
    ahead_rate = min(speed.computing, speed.data_workers * speed.loading)
    limit = "loading" if ahead_rate < speed.computing else "computing"
    lines.append(
        f"loading takes {100 * alone / speed.loading:.0f} % of a step: {amount(alone)} examples/s; with --data-workers "
        f"{speed.data_workers} up to {amount(ahead_rate)} examples/s, limited by {limit}"
    )
    if speed.cores == 1:
        lines.append("a rank has one core, which it shares with its data workers: the speed may be lower")
    elif (threads := speed.cores - speed.data_workers) < speed.threads:
        lines.append(f"a rank has {speed.cores} cores: with data workers use --threads {threads}")
    return lines


def _in_brackets(name: str | None, label: int) -> str:
    """Return the name of a class in brackets; an empty string if the class has no name, or its label is its name."""
    return "" if name in (None, str(label)) else f" ({name})"


def _values(tree: Any) -> str:
    """Return a short text with the values of a tree."""
    return ", ".join(map(_value, leaves(tree)))


def _value(leaf: Any) -> str:
    if not hasattr(leaf, "shape"):
        text = repr(leaf)
        return text if len(text) <= _WIDEST_TEXT else text[: _WIDEST_TEXT - 3] + "..."
    array = np.asarray(leaf)
    if array.size == 1:
        return str(array.reshape(()))
    if array.dtype.kind not in "biuf":
        return str(array.dtype)
    return f"{array.min():.4g} to {array.max():.4g}" if array.size else "empty"
