"""``mpitrain probe``, and ``mpitrain measure``, which its ranks run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..core.words import counted
from ..monitor.format import amount, format_table, size_of
from ..plan import options as flags
from ..plan.launch_options import LaunchOptions
from ..plan.option import names_of
from ..predict.measurements import LinkTimes, Probe, read_probe
from ..probe.request import options_of_modes
from .job_command import JobCommand, current_command, job_file_request

if TYPE_CHECKING:
    from ..probe.rank import ProbeRequest

_LAUNCH_OPTIONS = names_of([LaunchOptions], lambda info: not info.is_for_restarts)


def launch_flags() -> list[click.Option]:
    """Return the flags of the launcher that commands with short runs have."""
    return [option for option in flags.options_of(LaunchOptions) if option.name in _LAUNCH_OPTIONS]


def launch_options(values: Mapping[str, Any]) -> LaunchOptions:
    """Return the options of the launcher from the values of all flags."""
    return LaunchOptions(**{name: values[name] for name in _LAUNCH_OPTIONS})


def _output(default: str) -> click.Option:
    return click.Option(["-o", "--output"], type=flags.PATH, default=default, metavar="FILE", help=f"[{default}]")


def probe_command() -> JobCommand:
    """Return ``mpitrain probe``, which makes the measurements that predictions need."""
    about = (
        "Measure a job on these ranks and hosts, in less than a minute. The measurements include computing, updating, "
        "loading, transfers, and the gradient noise scale. mpitrain simulate predicts other configurations from them."
    )
    examples = ["mpitrain probe -n 2 jobs/mnist_mlp.py", "mpitrain probe --hosts a:4,b:4 jobs/mnist_mlp.py"]
    command = JobCommand("probe", [*launch_flags(), _output("probe.json")], _probe, about, examples)
    for option in command.params:
        if isinstance(option, click.Option) and options_of_modes([str(option.name)]):
            option.hidden = True  # refused with an explanation
    return command


def measure_command() -> JobCommand:
    """Return ``mpitrain measure``, the command that every rank of ``mpitrain probe`` runs."""
    about = "Measure on this rank, under mpirun or srun."
    return JobCommand(
        "measure", [_output("probe.json")], _measure, about, ["mpirun -n 2 mpitrain measure jobs/mnist_mlp.py"]
    )


def _probe(output: Path, **values: Any) -> int:
    from ..api.tuning import measure

    options = launch_options(values)
    status = measure(options, current_command().job_request(values), output)
    if status == 0 and not options.dry_run:
        click.echo("\n".join(describe(read_probe(output))))
        click.echo(f"\nwrote {output}")
    return status


def _measure(output: Path, **values: Any) -> ProbeRequest:
    from ..probe.rank import ProbeRequest

    return ProbeRequest(job_file_request(values), output)


def describe(probe: Probe) -> list[str]:
    """Return lines about the measurements."""
    job, ranks, compute = probe.job, probe.ranks, probe.compute
    lines = [
        f"{job.name}: {job.elements:,} parameters, {size_of(job.nbytes)}; {sum(ranks.ranks_per_node)} ranks on "
        f"{counted(len(ranks.ranks_per_node), 'node')} with {ranks.cores_per_node} cores",
        "",
    ]
    rows = [
        (str(batch), *map(short_time, times))
        for batch, *times in zip(compute.batches, compute.load_s, compute.forward_s, compute.backward_s, strict=True)
    ]
    lines += [format_table(("batch", "load", "forward", "backward"), rows), ""]
    updates = ", ".join(f"{short_time(s)} from {n}" for n, s in zip(compute.update_rows, compute.update_s, strict=True))
    spread = probe.step_factors
    lines += [
        f"all ranks at once: {compute.together:.2f} times as long; a step's other work: {short_time(compute.loop_s)}",
        f"update of all parameters: {updates} gradients; a server's: {short_time(probe.server.apply_s)}, reading "
        f"{short_time(probe.server.read_s)}",
        f"step times relative to their median: {spread[len(spread) // 10]:.2f} to "
        f"{spread[9 * len(spread) // 10]:.2f} for 80 % of the steps, at most {spread[-1]:.2f}",
        *(f"{name}: {_describe_link(link)}" for name, link in _links(probe)),
        "gradient noise scale: "
        + (f"{amount(probe.noise.scale_examples)} examples" if probe.noise.scale_examples else "not measurable"),
    ]
    return lines


def short_time(seconds: float) -> str:
    """Format a short time."""
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def _links(probe: Probe) -> list[tuple[str, LinkTimes]]:
    links = {"within a node": probe.within, "between nodes": probe.between}
    return [(name, link) for name, link in links.items() if link is not None]


def _describe_link(link: LinkTimes) -> str:
    burst = f", after a pause {size_of(link.burst_bytes)} at once" if link.burst_bytes else ""
    return (
        f"latency {short_time(link.latency_s)}, {size_of(link.bytes_per_s)}/s, all pairs of two nodes "
        f"{size_of(link.node_bytes_per_s)}/s{burst}"
    )
