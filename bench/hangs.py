"""Injects hangs into runs, and checks that each is reported with the right rank and reason; measures the time.

    python bench/hangs.py [COUNT] [--hosts]

Each run has one hang on a random rank (chief, worker, server), in a random mode. The hang is an endless loop in a
layer, a sleep in a hook, or SIGSTOP. With --hosts the ranks are on three hosts, made of network namespaces (needs root
and iproute2), and some runs lose the link of a host instead. Prints one line per hang, and a summary: the number of
hangs reported with the right rank or host, and the longest time from --hang-timeout or --link-timeout to the report.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from mpitrain.process import rank_status  # noqa: E402
from tests.support.hosts.network import Hosts, make_hosts  # noqa: E402

JOB = ROOT / "tests" / "support" / "jobs" / "hanging.py"
LIMIT_S = 5.0
LINK_LIMIT_S = 12.0
SERVER = ("--ps", "1", "--ps-placement", "first")
MODES = {
    "sync": (),
    "local": ("--mode", "local"),
    "async": ("--mode", "async"),
    "ssp, server": ("--mode", "ssp", *SERVER),
    "backup": ("--mode", "backup"),
}
# Hosts share no memory, so these modes need a server.
MODES_ON_HOSTS = {**MODES, "async": ("--mode", "async", *SERVER), "backup": ("--mode", "backup", *SERVER)}
WORDS = {"loop": "in the forward pass", "sleep": "in a hook", "stop": "stopped by a signal"}
FROM_HERE = ("stop", "link")  # caused by this script, not by the job: any rank can hang


def hang(flags: tuple[str, ...], kind: str, rank: int, hosts: Hosts | None, folder: Path) -> tuple[bool, float, str]:
    """Return whether the report is correct, the seconds from the time limit to the report, and the report."""
    words = [str(JOB), "--kind", "none" if kind in FROM_HERE else kind, "--rank", str(rank), "--steps", "1000000"]
    words += ["--hang-timeout", str(LIMIT_S), "--log-steps", "0", "--run-dir", str(folder), *flags]
    if hosts is None:
        command, environment = [sys.executable, "-m", "mpitrain", "run", "-n", "3", *words], dict(os.environ)
    else:
        command = hosts.run(Path(sys.executable), [1, 1, 1], *words, "--link-timeout", str(LINK_LIMIT_S))
        environment = {**os.environ, **hosts.environment}
    began = None
    report = ""
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment, text=True
    ) as run:
        deadline = time.monotonic() + 60
        while run.poll() is None and time.monotonic() < deadline:
            statuses = {status.rank: status for status in rank_status.read(folder)}
            steps = [status.step for status in statuses.values()]
            if len(statuses) == 3 and max(steps) >= 19:  # the layer hangs in the 20th step
                if kind == "stop":
                    os.kill(statuses[rank].pid, signal.SIGSTOP)
                elif kind == "link":
                    assert hosts is not None
                    hosts.set_link(rank + 1, "down")
                began = time.monotonic()
                break
            time.sleep(0.02)
        assert run.stderr is not None
        seconds = float("nan")
        for line in run.stderr:
            if ("made no progress" in line or "ending the ranks" in line) and not report:
                report, seconds = line.strip(), time.monotonic() - (began or 0)
        run.wait(timeout=60)
    if kind == "link":
        assert hosts is not None
        restore_link(hosts, rank + 1)
        return f"host {hosts.net}.{rank + 1} " in report, seconds - LINK_LIMIT_S, report
    named = re.search(r"rank (\d+)", report)
    right = named is not None and int(named[1]) == rank and WORDS[kind] in report
    return right, seconds - LIMIT_S, report


def restore_link(hosts: Hosts, number: int) -> None:
    """Wait until a disconnected host has ended its own ranks, and connect the host again."""
    deadline = time.monotonic() + 20
    while hosts.pids(number):
        assert time.monotonic() < deadline, f"host {number} has not ended its ranks"
        time.sleep(0.1)
    hosts.set_link(number, "up")
    time.sleep(2)  # until the bridge forwards again


def main() -> None:
    """Inject the hangs, and print the summary."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int, nargs="?", default=10)
    parser.add_argument("--hosts", action="store_true")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    draw = random.Random(given.seed)
    context = make_hosts(Path(sys.executable), 3) if given.hosts else nullcontext(None)
    correct, longest_s = 0, -math.inf
    with context as hosts, tempfile.TemporaryDirectory() as folder:
        for number in range(given.count):
            mode, kind = draw.choice(list(MODES)), draw.choice([*WORDS, "link"] if given.hosts else list(WORDS))
            flags = (MODES_ON_HOSTS if given.hosts else MODES)[mode]
            # A server computes no layer and calls no hook; the first host has the supervisor.
            first = 1 if kind == "link" or ("--ps" in flags and kind != "stop") else 0
            rank = draw.randrange(first, 3)
            right, seconds, report = hang(flags, kind, rank, hosts, Path(folder, str(number)))
            correct += right
            longest_s = max(longest_s, seconds) if right else longest_s
            words = f"{number:3d}  {mode:12} {kind:6} rank {rank}  {seconds:5.1f} s beyond the limit"
            print(f"{words}  {'ok' if right else repr(report)}", flush=True)
    print(f"{correct} of {given.count} reported correctly; the longest took {longest_s:.1f} s beyond the limit")


if __name__ == "__main__":
    main()
