"""Kill processes of runs at random moments: check that every run completes, and measure the time to the next step.

    python bench/recovery.py [--kills 200] [--mpis openmpi mpich] [--hosts] [--large]

The runs have two or three ranks, in all modes, with restarts from memory and with frequent checkpoints. A kill ends a
worker, the chief, a server, a reaper or the fork server. One kill in four does not wait for a step, and may happen
while the run restarts. Each run must complete and leave nothing behind. In ``sync`` and ``local``, its parameters must
be those of an undisturbed run. With ``--hosts`` (root, iproute2) each rank is on a separate host.

On one host, another run then measures the time from a kill to the next completed step. This time is compared with the
time of a run of one step. ``--large`` only does this, with a model of 100 million parameters.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from environment import one_thread_and_own_kernels, use_this_checkout

use_this_checkout()
from mpitrain.process import fork_server, rank_status  # noqa: E402
from mpitrain.process.pid import parent_of  # noqa: E402
from tests.support.hosts.network import Hosts, make_hosts  # noqa: E402
from tests.support.launch import Mpi  # noqa: E402
from tests.support.recovery import KilledRun  # noqa: E402
from tests.support.results import SMALL, assert_same_bits, final  # noqa: E402

ROOT = Path(__file__).parents[1]
STEPS = 12000
FLAGS = ("--train-steps", str(STEPS), "--validate-steps", "0", "--log-steps", "0", "--threads", "1")
SERVERS = ("--ps", "1", "--no-normalize")
MODES = {
    "sync": (),
    "local": ("--mode", "local", "--local-steps", "3"),
    "async": ("--mode", "async", *SERVERS),
    "ssp": ("--mode", "ssp", "--staleness", "1", *SERVERS),
    "backup": ("--mode", "backup", *SERVERS),
}
SAVES = ("--save-secs", "0.2", "--keep", "2")
VICTIMS = ("worker", "chief", "ps", "reaper", "fork server")
KILLS = 10  # of a run


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--mpis", nargs="+", default=["openmpi", "mpich"], choices=["openmpi", "mpich"])
    parser.add_argument("--hosts", action="store_true")
    parser.add_argument("--large", action="store_true")
    arguments = parser.parse_args()
    one_thread_and_own_kernels()
    print(f"bench/recovery.py, {_cpu()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}", flush=True)
    environments = {"openmpi": Path(sys.executable), "mpich": ROOT / ".venv-mpich" / "bin" / "python"}
    mpis = [Mpi(name, environments[name]) for name in arguments.mpis]
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        if arguments.large:
            measure(mpis[0], Path(folder), arguments.kills, ROOT / "bench" / "jobs" / "links.py", *_large())
            return
        hosts = stack.enter_context(make_hosts(mpis[0].python, 3)) if arguments.hosts else None
        kill_at_random(mpis, Path(folder), arguments.kills, hosts)
        if hosts is None:
            measure(mpis[0], Path(folder), 15, ROOT / "jobs" / "mnist_mlp.py")


def kill_at_random(mpis: list[Mpi], folder: Path, kills: int, hosts: Hosts | None) -> None:
    """Start runs with each MPI library and mode in turn, and kill their processes, until ``kills`` is reached."""
    counts: Counter[str] = Counter()
    wholes: dict[tuple[str, str], dict[str, object]] = {}
    chance, number = random.Random(kills), 0
    while counts.total() < kills:
        for mpi in mpis:
            for mode, flags in MODES.items():
                if counts.total() >= kills:
                    break
                number += 1
                n = 3 if "--ps" in flags or hosts is not None else 2
                run_dir = folder / f"{mpi.name}-{mode}-{number}"
                with KilledRun(mpi, n, run_dir, SMALL, *FLAGS, *SAVES, *flags, hosts=hosts) as run:
                    for _ in range(min(KILLS, kills - counts.total())):
                        counts[_kill(run, chance)] += 1
                    run.end()
                if mode in ("sync", "local"):
                    key = (mpi.name, mode)
                    if key not in wholes:
                        with KilledRun(
                            mpi, n, folder / f"{mpi.name}-{mode}", SMALL, *FLAGS, *flags, hosts=hosts
                        ) as run:
                            run.end()
                        wholes[key] = final(folder / f"{mpi.name}-{mode}")
                    assert_same_bits(final(run_dir), wholes[key])
                print(f"{mpi.name} {mode}: completed; kills so far: {dict(counts)}", flush=True)
                shutil.rmtree(run_dir)
    where = "three hosts" if hosts is not None else "one host"
    print(f"{counts.total()} kills on {where}, {number} runs: all completed", flush=True)


def _kill(run: KilledRun, chance: random.Random) -> str:
    """Kill a random process of a run at a random moment; return the kind of process."""
    while True:
        if chance.random() < 0.75:
            step = max((rank.step for rank in rank_status.read(run.run_dir)), default=0)
            run.wait_for_step(step + 1)
            time.sleep(chance.uniform(0, 0.3))
        else:
            time.sleep(chance.uniform(0, 0.8))
        assert run.process.poll() is None, run.output
        victim, pid = chance.choice(VICTIMS), 0
        ranks = rank_status.read(run.run_dir)
        workers = [rank for rank in ranks if rank.role != "ps"]
        servers = [rank for rank in ranks if rank.role == "ps"]
        if victim in ("worker", "chief") and workers:
            pid = workers[0 if victim == "chief" else -1].pid
        elif victim == "ps" and servers:
            pid = servers[0].pid
        elif ranks and victim == "reaper":
            pid = chance.choice(ranks).reaper
        elif ranks and victim == "fork server":
            pid = parent_of(ranks[0].reaper)
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/comm").read_bytes().strip() != fork_server.NAME:
                    pid = 0  # no fork server before the first restart
        if pid > 1:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                return victim


def measure(mpi: Mpi, folder: Path, kills: int, job: Path, *flags: str) -> None:
    """Measure the time from a kill to the next step and the time of a run of one step alternately; print both."""
    recoveries, alone = [], []
    flags = (*flags, "--validate-steps", "0", "--log-steps", "0", "--train-steps")
    with KilledRun(mpi, 2, folder / "measured", job, *flags, "100000000") as run:
        for number in range(kills):
            pids: list[int] = []
            ranks = run.wait_for_ranks()
            run.wait_for_step(max(rank.step for rank in ranks) + 5)
            time.sleep(0.5)
            ranks = rank_status.read(run.run_dir)
            pids += [rank.pid for rank in ranks]
            began = time.perf_counter()
            os.kill(ranks[number % 2].pid, signal.SIGKILL)
            resumed = run.wait_for_ranks(other_than=pids)
            run.wait_for_step(max(rank.step for rank in resumed) + 1, poll_s=0.0005)
            recoveries.append(time.perf_counter() - began)
            run.process.send_signal(signal.SIGSTOP)  # the ranks must not compete
            for rank in rank_status.read(run.run_dir):
                os.kill(rank.pid, signal.SIGSTOP)
            one = folder / "one"
            began = time.perf_counter()
            words = [str(mpi.python), "-m", "mpitrain", "run", "-n", "2", str(job), *flags, "1", "--run-dir", str(one)]
            subprocess.run([*words, "--save-secs", "0"], check=True, stdout=subprocess.DEVNULL)
            alone.append(time.perf_counter() - began)
            shutil.rmtree(one)
            for rank in rank_status.read(run.run_dir):
                os.kill(rank.pid, signal.SIGCONT)
            run.process.send_signal(signal.SIGCONT)
        run.process.send_signal(signal.SIGINT)
        run.process.wait(60)
    recoveries.sort()
    median, one_step = statistics.median(recoveries), statistics.median(alone)
    high = recoveries[max(0, -(-len(recoveries) * 95 // 100) - 1)]
    print(f"{job.stem}, {kills} kills: {median:.2f} s from the kill to the next step, 95 % at most {high:.2f} s;")
    print(f"a run of one step {one_step:.2f} s; ratios {median / one_step:.2f} and {high / one_step:.2f}", flush=True)


def _large() -> tuple[str, ...]:
    data = "/usr/share/datasets/fashion-mnist"
    return ("--data-dir", data, "--hidden", "9500", "--layers", "2", "--batch-size", "16")


def _cpu() -> str:
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return names[0].partition(":")[2].strip() if names else platform.machine()


if __name__ == "__main__":
    main()
