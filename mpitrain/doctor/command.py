"""``mpitrain doctor``: runs the checks on new ranks, or on the ranks of the launcher that has started it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import click
from rich.console import Console

from ..errors import LaunchError
from ..plan.options import examples
from ..process.launcher_env import is_launched, launched_rank
from .finding import Finding, as_json, exit_status, from_json, show

_PIPE_COLUMNS = 1000


@click.command("doctor", epilog=examples("mpitrain doctor -n 4", "srun mpitrain doctor"))
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
@click.option("--timeout", default=120, show_default=True, metavar="S", help="Seconds before a hanging check is ended.")
def doctor_command(ranks: int | None, run_dir: Path, json_: bool, timeout: int) -> int:
    """Check whether this machine can train.

    Prints all findings, with advice for warnings and failures. The exit status is 1 if any check fails. To check and
    compare the ranks of mpirun or srun, start this command with it.
    """
    if is_launched(os.environ):
        findings = examine(run_dir, timeout)
        if findings is None:
            return 0  # rank 0 prints the findings
    else:
        findings = _start_ranks(ranks, run_dir, timeout)
    if json_:
        click.echo(as_json(findings))
    else:
        # Lines are wrapped for a terminal only.
        show(findings, Console(highlight=False, width=None if sys.stdout.isatty() else _PIPE_COLUMNS))
    return exit_status(findings)


def examine(run_dir: Path, timeout_s: float) -> list[Finding] | None:
    """Run all checks on the existing ranks; return None on ranks other than 0. Collective over all ranks."""
    from ..comm.cluster import Cluster, report_crash
    from . import files, gpu, slurm, transfers, world

    findings: list[Finding] = []
    watchdog = _Watchdog(timeout_s, findings)
    try:
        cluster = Cluster()
    except LaunchError as error:
        watchdog.cancel()
        return [world.not_started(error), *slurm.check()] if launched_rank(os.environ) == 0 else None
    topics: list[tuple[str, Callable[[], Iterator[Finding]]]] = [
        (world.TOPIC, lambda: world.check(cluster)),
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


def _start_ranks(ranks: int | None, run_dir: Path, timeout_s: float) -> list[Finding]:
    """Start ranks that run the checks, and return their findings; if no rank can be started, check in this process."""
    from ..launcher.command_line import compose
    from ..launcher.mpi_flavors import find_launcher
    from ..launcher.mpi_launcher import LaunchSpec, LocalMachine

    machine = LocalMachine.detect()
    if ranks is None and not machine.allocated:
        ranks = 2
    try:
        launcher = find_launcher()
        words = ["--json", "--run-dir", str(run_dir), "--timeout", str(timeout_s)]
        command = compose(launcher, LaunchSpec(ranks), machine, words, "doctor")
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
    except subprocess.TimeoutExpired as error:
        out, err, status = "", str(error.stderr or b"", "utf-8", "replace"), f"did not exit within {timeout_s + 30} s"
    start = out.find("[\n")
    if start >= 0:
        return from_json(out[start:])
    why = next((line for line in err.splitlines() if line.strip("- \t")), "it printed no error")
    return _without_ranks(run_dir, timeout_s, f"{launcher.program} {status}", f"{why.strip()} (try: {command})")


def _without_ranks(run_dir: Path, timeout_s: float, details: str, advice: str) -> list[Finding]:
    return [Finding("Ranks", "start", "failure", details, advice), *(examine(run_dir, timeout_s) or [])]
