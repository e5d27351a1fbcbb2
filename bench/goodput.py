"""Goodput under kills, beside torchrun and Lightning: kept steps, relative to those of an undisturbed run.

    python bench/goodput.py [--seconds 300] [--every 30] [--only mpitrain learners ddp lightning] [--hosts]

Two ranks train ``programs/killed.py``, for 300 s from the first step on. Every 30 s, one of them, chosen at random, is
killed with SIGKILL. An undisturbed run of 30 s before says how many steps there could have been. DDP and Lightning are
started with ``torchrun --max-restarts``, in the environment ``.venv-programs`` of ``make env``.

``learners`` are two runs of one rank with ``--join``. All processes of one of them are killed, and it is started again
5 s later. Their kept steps are the merged examples, divided by those of a step of two ranks.

With ``--hosts`` (root, iproute2), there are three hosts with one rank each; not for ``learners``.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TextIO

from environment import one_thread_and_own_kernels, use_this_checkout
from learners import merged

use_this_checkout()
from tests.support.hosts.network import Hosts, make_hosts  # noqa: E402
from tests.support.launch import LAUNCHER_ENVIRONMENT  # noqa: E402

SCRIPT = Path(__file__).parent / "programs" / "killed.py"
PEERS = Path(__file__).parents[1] / ".venv-programs" / "bin" / "python"
UNDISTURBED_S = 30.0
START_S = 180.0  # time limit for the first step
REST_S = 5.0  # before a killed learner starts again
EXAMPLES = 32  # of a step of two ranks
RESTARTS = "--max-restarts", "1000"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--every", type=float, default=30)
    parser.add_argument("--only", nargs="+", default=["mpitrain", "learners", "ddp", "lightning"])
    parser.add_argument("--hosts", action="store_true")
    arguments = parser.parse_args()
    if arguments.hosts and "learners" in arguments.only:
        parser.error("--hosts is not for learners: choose others with --only")
    one_thread_and_own_kernels()
    print(f"bench/goodput.py, {os.cpu_count()} cores", flush=True)
    with make_hosts(Path(sys.executable), 3) if arguments.hosts else contextlib.nullcontext() as hosts:
        for library in arguments.only:
            whole = _train(library, UNDISTURBED_S, UNDISTURBED_S, hosts) * arguments.seconds / UNDISTURBED_S
            kept = _train(library, arguments.seconds, arguments.every, hosts)
            load = f"load {os.getloadavg()[1]:.1f}"
            print(
                f"{library}: {kept:,.0f} steps kept, {whole:,.0f} undisturbed: {100 * kept / whole:.1f} %; {load}",
                flush=True,
            )


def _train(library: str, seconds: float, every: float, hosts: Hosts | None) -> float:
    """Train for ``seconds`` from the first step on, with kills ``every`` seconds; return the number of kept steps."""
    with tempfile.TemporaryDirectory() as name, (Path(name) / "output").open("w+") as output:
        folder, chance = Path(name), random.Random(0)
        commands = _commands(library, folder, hosts)
        processes = [_start(words, output, hosts) for words in commands]
        died_at = [0.0] * len(processes)
        first, step, end, next_kill = 0.0, 0.0, time.monotonic() + START_S, 0.0
        try:
            while (now := time.monotonic()) < end:
                for number in range(len(processes)):
                    if died_at[number] and now - died_at[number] >= REST_S:
                        died_at[number], processes[number] = 0.0, _start(commands[number], output, hosts)
                    assert died_at[number] or processes[number].poll() is None, (folder / "output").read_text()
                ranks = _ranks(folder, 3 if hosts else 2)
                if ranks:
                    step = merged(folder / "run") / EXAMPLES if library == "learners" else int(ranks[0][1])
                    if not next_kill:
                        first, end, next_kill = step, now + seconds, now + every
                if next_kill and now >= next_kill and not any(died_at):
                    next_kill += every
                    if library == "learners":
                        number = chance.randrange(2)
                        os.killpg(processes[number].pid, signal.SIGKILL)
                        processes[number].wait()
                        died_at[number] = now
                    else:
                        number = chance.randrange(len(ranks))
                    with contextlib.suppress(ProcessLookupError):  # a rank is being started again
                        os.kill(int(ranks[number][0]), signal.SIGKILL)
                time.sleep(0.005)
        finally:
            for process in processes:
                process.terminate()
            for process in processes:
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:  # torchrun on other hosts waits for each other
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        assert step, "no step within the time limit"
        return step - first


def _commands(library: str, folder: Path, hosts: Hosts | None) -> list[list[str]]:
    """Return the commands that are started at the same time."""
    torchrun = [str(PEERS), "-m", "torch.distributed.run"]
    if library == "mpitrain":
        words = ["--run-dir", str(folder / "run"), *RESTARTS, str(SCRIPT), library, str(folder)]
        if hosts is not None:
            return [hosts.run(Path(sys.executable), [1, 1, 1], *words)]
        return [[sys.executable, "-m", "mpitrain", "run", "-n", "2", *words]]
    if library == "learners":
        script = str(SCRIPT), "mpitrain", str(folder)
        join = ["run", "-n", "1", "--join", str(folder / "run"), "--run-dir"]
        return [
            [sys.executable, "-m", "mpitrain", *join, f"{folder}/run/learners/{number}", *script, str(number)]
            for number in range(2)
        ]
    script = [*RESTARTS, str(SCRIPT), library, str(folder)]
    if hosts is None:
        return [[*torchrun, "--standalone", "--nproc-per-node", "2", *script]]
    meet = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{hosts.net}.1:29400", "--rdzv-id", "1"]
    commands = []
    for number in (1, 2, 3):  # the hosts have one hostname, so torchrun cannot tell by it where to listen
        own = ["--rdzv-conf", f"is_host={number == 1}", "--local-addr", f"{hosts.net}.{number}"]
        on_host = ["ip", "netns", "exec", f"{hosts.prefix}{number}", "env", "GLOO_SOCKET_IFNAME=eth0"]
        commands.append([*on_host, *torchrun, "--nnodes", "3", "--nproc-per-node", "1", *meet, *own, *script])
    return commands


def _start(words: list[str], output: TextIO, hosts: Hosts | None) -> subprocess.Popen[bytes]:
    environment = {**os.environ, **LAUNCHER_ENVIRONMENT, **({} if hosts is None else hosts.environment)}
    return subprocess.Popen(words, env=environment, stdout=output, stderr=output, start_new_session=True)


def _ranks(folder: Path, count: int) -> list[list[str]]:
    """Return process id and step of all ranks, once all have completed a step."""
    files = [folder / str(rank) for rank in range(count)]
    return [file.read_text().split() for file in files] if all(file.exists() for file in files) else []


if __name__ == "__main__":
    main()
