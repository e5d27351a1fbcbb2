"""``mpitrain doctor``: runs the checks on new ranks, or on the ranks of the launcher that has started it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from ..errors import LaunchError
from ..plan.launch_options import LaunchOptions
from ..plan.option import names_of
from ..plan.options import examples, options_of
from ..process.launcher_env import is_launched, launched_rank
from .finding import Finding, as_json, exit_status, from_json, show

_PIPE_COLUMNS = 1000


@click.command(
    "doctor", epilog=examples("mpitrain doctor -n 4", "mpitrain doctor --hosts n1,n2", "srun mpitrain doctor")
)
@click.option(
    "-n", "--ranks", type=click.IntRange(min=1), help="Ranks to start.  [default: 2, or the allocation's tasks]"
)
@click.option(
    "--run-dir",
    type=click.Path(path_type=Path),
    default=Path("runs"),
    show_default=True,
    metavar="DIR",
    help="Directory in which runs will be stored.",
)
@click.option("--json", "json_", is_flag=True, help="Print the findings as JSON.")
@click.option("--nodes", type=click.IntRange(min=1), metavar="N", help="Check N nodes of Slurm, by salloc.")
@click.option("--timeout", default=120, show_default=True, metavar="S", help="Seconds before a hanging check is ended.")
def doctor_command(run_dir: Path, json_: bool, nodes: int | None, timeout: int, **values: Any) -> int:
    """Check whether this machine, or several hosts, can train.

    Prints all findings, with advice for warnings and failures, and what differs between hosts. The exit status is 1 if
    any check fails. To check and compare the ranks of mpirun or srun, start this command with it.
    """
    if is_launched(os.environ):
        findings = examine(run_dir, timeout)
        if findings is None:
            return 0  # rank 0 prints the findings
    else:
        findings = _start_ranks(LaunchOptions(**values), nodes, run_dir, timeout)
    if json_:
        click.echo(as_json(findings))
    else:
        # Lines are wrapped for a terminal only.
        show(findings, Console(highlight=False, width=None if sys.stdout.isatty() else _PIPE_COLUMNS))
    return exit_status(findings)


def examine(run_dir: Path, timeout_s: float) -> list[Finding] | None:
    """Run all checks on the existing ranks; return None on ranks other than 0. Collective over all ranks."""
    from ..comm.cluster import Cluster, report_crash
    from . import files, gpu, hosts, slurm, transfers, world

    findings: list[Finding] = []
    watchdog = _Watchdog(timeout_s, findings)
    try:
        cluster = Cluster()
    except LaunchError as error:
        watchdog.cancel()
        return [world.not_started(error), *slurm.check()] if launched_rank(os.environ) == 0 else None
    topics: list[tuple[str, Callable[[], Iterator[Finding]]]] = [
        (world.TOPIC, lambda: world.check(cluster)),
        (hosts.TOPIC, lambda: hosts.check(cluster)),
        (transfers.TOPIC, lambda: transfers.check(cluster)),
        (files.TOPIC, lambda: files.check(cluster, run_dir)),
        (gpu.TOPIC, lambda: gpu.check(cluster)),
    ]
    if cluster.rank == 0:
        topics.append((slurm.TOPIC, slurm.check))
    for topic, check in topics:
        watchdog.topic = topic
        try:
            findings += check()
        except Exception as error:
            print(report_crash(cluster, error), file=sys.stderr, flush=True)
            cluster.abort(1)
    watchdog.cancel()
    return findings if cluster.rank == 0 else None


_OF_HOSTS = names_of([LaunchOptions], lambda info: info.names_hosts)
doctor_command.params += [option for option in options_of(LaunchOptions) if option.name in _OF_HOSTS]


class _Watchdog(threading.Timer):
    """If a check hangs, prints the name of the check, and ends this process and thereby all ranks."""

    def __init__(self, timeout_s: float, findings: Sequence[Finding]) -> None:
        super().__init__(timeout_s, self._end)
        self.daemon = True
        self.topic = "MPI startup"
        self._timeout_s, self._findings = timeout_s, findings
        self.start()

    def _end(self) -> None:
        last = f" after '{self._findings[-1].check}'" if self._findings else ""
        print(
            f"mpitrain doctor: no answer within {self._timeout_s:g} s while checking {self.topic.lower()}{last}; "
            "ranks hang if they cannot reach each other: check firewalls and the network that MPI uses",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)


def _start_ranks(options: LaunchOptions, nodes: int | None, run_dir: Path, timeout_s: float) -> list[Finding]:
    """Start ranks that run the checks, and return their findings; if no rank can be started, check in this process."""
    from ..batch_systems.registry import remote_agent
    from ..launcher.command_line import Command, compose
    from ..launcher.hosts import RemoteAgent
    from ..launcher.mpi_flavors import find_launcher
    from ..launcher.mpi_launcher import LocalMachine
    from ..launcher.preparation import make_launch_spec

    machine, lost = LocalMachine.detect(), list[Finding]()
    if options.ranks is None and options.hosts is None and options.hostfile is None and not machine.allocated:
        options = replace(options, ranks=2)
    try:
        launcher = find_launcher()
        spec = make_launch_spec(options, launcher, machine)
        if spec.hosts is not None:
            errors = RemoteAgent(options.remote_agent or remote_agent(machine.environ)).unreachable(spec.hosts)
            lost = [Finding("Hosts", f"host {host}", "failure", "unreachable", why) for host, why in errors.items()]
            left = [host for host in spec.hosts if host.name not in errors]
            spec = replace(spec, hosts=left or None, ranks=sum(host.slots for host in left) or 2)
        words = ["--json", "--run-dir", str(run_dir), "--timeout", str(timeout_s)]
        command = compose(launcher, spec, machine, words, "doctor")
        if nodes is not None:
            allocate = ["salloc", "--quiet", f"--nodes={nodes}", "--ntasks-per-node=1"]
            command = Command([*allocate, sys.executable, "-m", "mpitrain", "doctor", *words], {})
    except LaunchError as error:
        return _without_ranks(run_dir, timeout_s, "no ranks can be started", str(error))
    try:
        answer = subprocess.run(
            command.words,
            env={**os.environ, **command.environment},
            capture_output=True,
            text=True,
            timeout=timeout_s + 30,
            check=False,
        )
        out, err, status = answer.stdout, answer.stderr, f"exited with status {answer.returncode}"
    except OSError as error:
        out, err, status = "", f"{command.words[0]}: {error.strerror}", "cannot be run"
    except subprocess.TimeoutExpired as error:
        out, err, status = "", str(error.stderr or b"", "utf-8", "replace"), f"did not exit within {timeout_s + 30} s"
    start = out.find("[\n")
    if start >= 0:
        return [*lost, *from_json(out[start:])]
    why = next((line for line in err.splitlines() if line.strip("- \t")), "it printed no error")
    details = f"{command.words[0]} {status}"
    return [*lost, *_without_ranks(run_dir, timeout_s, details, f"{why.strip()} (try: {command})")]


def _without_ranks(run_dir: Path, timeout_s: float, details: str, advice: str) -> list[Finding]:
    return [Finding("Ranks", "start", "failure", details, advice), *(examine(run_dir, timeout_s) or [])]
