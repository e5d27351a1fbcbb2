"""``mpitrain placement``."""

from __future__ import annotations

from typing import Any

from ..errors import ConfigError
from ..monitor.format import format_table, size_of
from ..plan.job import errors_located
from ..plan.placement import ranges_of
from ..plan.plan import Plan, make_plan
from .job_command import JobCommand, job_file_request


def _placement(**values: Any) -> int:
    request = job_file_request(values)
    job = request.make()
    config = job.completed(request.config.merged({"batch_size": 1}))
    if not config.servers.ps:
        raise ConfigError("--ps 0: there is no server to place variables on; give --ps 1 or more")
    with errors_located(request.job_file, job):
        plan = make_plan(job, config, workers=2 + config.parallel.most_spare_workers)
    print(placement_table(plan))
    return 0


def placement_command() -> JobCommand:
    """Return ``mpitrain placement``, which shows on which server each variable is placed."""
    about = "Print which server holds which variable, without training."
    example = "mpitrain placement jobs/mnist_mlp.py --ps 2 --placement greedy"
    return JobCommand("placement", [], _placement, about, [example], mode="async", ps=1)


def placement_table(plan: Plan) -> str:
    """Return a table of each variable's shape, bytes and servers, and a table of each server's bytes."""
    itemsize = plan.dtype.itemsize
    rows = []
    for entry in plan.layout.entries:
        placements = [placement for placement in plan.placements if placement.entry == entry]
        where = ", ".join(
            str(p.server) if len(placements) == 1 else f"{p.server} [{p.start - entry.start}:{p.stop - entry.start}]"
            for p in placements
        )
        rows.append((entry.name, "x".join(map(str, entry.shape)) or "1", f"{entry.size * itemsize:,}", where))
    held = [
        sum(hi - lo for lo, hi in ranges_of(plan.placements, server, plan.layout)) * itemsize
        for server in range(plan.n_servers)
    ]
    total = max(1, sum(held))
    servers = [(str(s), f"{n:,}", size_of(n), f"{100 * n / total:.0f} %") for s, n in enumerate(held)]
    return (
        format_table(("variable", "shape", "bytes", "server [elements]"), rows)
        + "\n\n"
        + format_table(("server", "bytes", "", "share"), servers)
    )
