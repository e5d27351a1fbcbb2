"""Kill processes of runs at random moments: check that every run completes, and measure the time to the next step.

    python bench/recovery.py [--kills 200] [--mpis openmpi mpich] [--hosts | --campaign] [--large]

The runs have two or three ranks, in all modes, with restarts from memory and with frequent checkpoints. A kill ends a
worker, the chief, a server, a reaper or the fork server. One kill in four does not wait for a step, and may happen
while the run restarts. Each run must complete and leave nothing behind. In ``sync`` and ``local``, its parameters must
be those of an undisturbed run. With ``--hosts`` (root, iproute2) each rank is on a separate host.

With ``--campaign`` (also root, iproute2), runs in ``sync`` have two ranks on each of two hosts, and a spare host. A
kill ends a rank or a host. The host answers again at once, or only after the run has continued without it. When both
other hosts were lost, they are repaired, and ``mpitrain scale`` adds them. The goodput that a run reports is compared
with the share of the time that its kept steps took, as seen from outside. The time between two steps that is seen from
outside includes waiting, saving, validation and hooks, and says nothing about idle spare hosts. The reported shares of
the former are therefore added to the goodput, and the shares of the time of used hosts are compared.

On one host, another run then measures the time from a kill to the next completed step. This time is compared with the
time of a run of one step. ``--large`` only does this, with a model of 100 million parameters.

With ``--losses`` (root, iproute2), three hosts have two ranks each, and one is lost: the others continue. Or two hosts
have two ranks each, and the third takes the place of a lost one. The times from the loss to the next step are compared.
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
import threading
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

from environment import one_thread_and_own_kernels, use_this_checkout

use_this_checkout()
from mpitrain.launcher import bad_hosts  # noqa: E402
from mpitrain.monitor.goodput import accounts_in  # noqa: E402
from mpitrain.monitor.metrics import read_lines  # noqa: E402
from mpitrain.process import fork_server, rank_status, state_folder  # noqa: E402
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
CAMPAIGN_STEPS = 3000
CAMPAIGN_FLAGS = ("--no-joint", "--train-steps", str(CAMPAIGN_STEPS), "--validate-steps", "0", "--threads", "1")
SEEN_AS_STEPS = ("steps", "waiting", "saving", "validation", "hooks")  # by who only sees the number of steps
WITH_SPARE = ("--min-ranks", "1", "--spare-hosts", "1", "--link-timeout", "10")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--mpis", nargs="+", default=["openmpi", "mpich"], choices=["openmpi", "mpich"])
    parser.add_argument("--hosts", action="store_true")
    parser.add_argument("--campaign", action="store_true")
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--losses", action="store_true")
    arguments = parser.parse_args()
    one_thread_and_own_kernels()
    print(f"bench/recovery.py, {_cpu()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}", flush=True)
    environments = {"openmpi": Path(sys.executable), "mpich": ROOT / ".venv-mpich" / "bin" / "python"}
    mpis = [Mpi(name, environments[name]) for name in arguments.mpis]
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        if arguments.large:
            measure(mpis[0], Path(folder), arguments.kills, ROOT / "bench" / "jobs" / "links.py", *_large())
            return
        needs_hosts = arguments.hosts or arguments.campaign or arguments.losses
        hosts = stack.enter_context(make_hosts(mpis[0].python, 3)) if needs_hosts else None
        if hosts is not None and arguments.campaign:
            campaign(mpis, Path(folder), arguments.kills, hosts)
            return
        if hosts is not None and arguments.losses:
            for own in ((), ("--torch",)):
                measure_losses(mpis[0], Path(folder), arguments.kills, hosts, *own)
            return
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


class Seen(NamedTuple):
    """The chief at a moment."""

    time: float
    pid: int
    step: int


def campaign(mpis: list[Mpi], folder: Path, kills: int, hosts: Hosts) -> None:
    """Kill ranks and hosts of runs with each MPI library in turn; print how many runs completed, and the goodput."""
    with KilledRun(mpis[0], 3, folder / "whole", SMALL, *CAMPAIGN_FLAGS, *WITH_SPARE, hosts=hosts, slots=2) as run:
        run.end()
    whole, chance, counts = final(folder / "whole"), random.Random(kills), Counter[str]()
    runs, failed, differing, worst, totals = 0, 0, 0, 0.0, [0.0, 0.0, 0.0]
    while counts.total() < kills:
        mpi, run_dir = mpis[runs % len(mpis)], folder / f"run-{runs}"
        seen: list[Seen] = []
        runs, began = runs + 1, time.time()
        with KilledRun(mpi, 3, run_dir, SMALL, *CAMPAIGN_FLAGS, *WITH_SPARE, hosts=hosts, slots=2) as run:
            observer = threading.Thread(target=_observe, args=(run, seen), daemon=True)
            observer.start()
            try:
                for number in range(1, KILLS + 1):
                    at = CAMPAIGN_STEPS * number // (KILLS + 2)
                    counts[_kill_rank_or_host(run, hosts, chance, at)] += 1
                run.end()
            except (AssertionError, subprocess.TimeoutExpired) as error:
                failed += 1
                print(f"{run_dir.name} failed: {error}\n{run.output}", flush=True)
                continue
        observer.join()
        try:
            assert_same_bits(final(run_dir), whole)
        except AssertionError as error:
            differing += 1
            print(f"{run_dir.name}: {error}", flush=True)
        account, measured = accounts_in(read_lines(run_dir / "metrics.jsonl"))[-1], _goodput(seen, began)
        seconds = account.at - account.since
        reported = sum(account.seconds.get(kind, 0.0) for kind in SEEN_AS_STEPS) / seconds
        worst = max(worst, abs(reported - measured))
        totals = [a + b * seconds for a, b in zip(totals, (1.0, reported, measured), strict=True)]
        print(f"{run_dir.name}, {mpi.name}: {dict(counts)}", flush=True)
        print(f"  {account.describe()}")
        print(f"  kept steps: {100 * reported:.1f} % of the hosts in use reported, {100 * measured:.1f} % measured")
    print(f"{counts.total()} kills, {dict(counts)}")
    print(f"{runs - failed} of {runs} runs completed, {differing} of them with other bits")
    both = f"{100 * totals[1] / totals[0]:.1f} % reported and {100 * totals[2] / totals[0]:.1f} % measured"
    print(f"kept steps of used hosts, all runs: {both}; in one run at most {100 * worst:.1f} points apart", flush=True)


def _kill_rank_or_host(run: KilledRun, hosts: Hosts, chance: random.Random, at: int) -> str:
    """Kill a rank or a host at a random moment, usually after the step ``at``; return what was killed."""
    while True:
        if chance.random() < 0.75:
            run.wait_for_step(at)
            time.sleep(chance.uniform(0, 0.3))
        else:
            time.sleep(chance.uniform(0, 2))
        assert run.process.poll() is None, run.output
        ranks, lost = rank_status.read(run.run_dir), bad_hosts.read(run.run_dir)
        left = [number for number in (2, 3) if f"{hosts.net}.{number}" not in lost]
        if not left and {rank.host for rank in ranks} == {"h1"} and all(rank.is_training for rank in ranks):
            _repair(run, hosts)
            continue
        run.gone.write_text("")
        if left and chance.random() < 0.5:
            number, returns = chance.choice(left), chance.random() < 0.5
            run.gone.write_text("" if returns else f"{number}\n")
            hosts.kill(number)
            with patch("socket.gethostname", return_value=f"h{number}"):
                state_folder.remove(str(run.run_dir))
            return "host that returns" if returns else "host"
        if ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(chance.choice(ranks).pid, signal.SIGKILL)
                return "rank"


def _repair(run: KilledRun, hosts: Hosts) -> None:
    """Add the hosts that were lost to a run."""
    run.gone.write_text("")
    (run.run_dir / bad_hosts.FILE).unlink()
    names = ",".join(f"{hosts.net}.{number}:2" for number in (1, 2, 3))
    words = [*hosts.on_first(), sys.executable, "-m", "mpitrain", "scale", str(run.run_dir), "--hosts", names]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr + run.output


def _observe(run: KilledRun, seen: list[Seen]) -> None:
    """Add what is seen of the chief until the run has ended."""
    while run.process.poll() is None:
        ranks = [rank for rank in rank_status.read(run.run_dir) if not rank.rank and rank.is_training and not rank.done]
        seen += [Seen(time.time(), rank.pid, rank.step) for rank in ranks]
        time.sleep(0.01)


def _goodput(seen: list[Seen], began: float) -> float:
    """Return the share of the time that went into steps from which the run has continued."""
    kept_s, end = 0.0, seen[-1].step
    for pid in reversed(dict.fromkeys(moment.pid for moment in seen)):
        attempt = [moment for moment in seen if moment.pid == pid]
        last = min(end, attempt[-1].step)
        kept_s += next(moment.time for moment in attempt if moment.step >= last) - attempt[0].time
        end = attempt[0].step
    return kept_s / (seen[-1].time - began)


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


def measure_losses(mpi: Mpi, folder: Path, losses: int, hosts: Hosts, *own: str) -> None:
    """Measure the time from the loss of a host to the next step, without and with a spare host alternately.

    Args:
        own: Flags of ``bench/jobs/resting.py``.
    """
    job, name = ROOT / "bench" / "jobs" / "resting.py", " ".join(("resting", *own))
    seconds: dict[str, list[float]] = {"without a spare": [], "with a spare": []}
    flags = ("--validate-steps", "0", "--log-steps", "0", "--threads", "1", "--train-steps", "100000000")
    kinds = {"without a spare": ("--min-ranks", "4"), "with a spare": ("--spare-hosts", "1")}
    for number in range(losses):
        for kind, more in kinds.items():
            run_dir = folder / f"losses-{len(own)}-{number}-{len(more[0])}"
            with KilledRun(mpi, 3, run_dir, job, *flags, *own, *more, hosts=hosts, slots=2) as run:
                ranks = run.wait_for_ranks()
                run.wait_for_step(max(rank.step for rank in ranks) + 5)
                time.sleep(20)  # a process on the spare host has imported its modules
                pids = [rank.pid for rank in rank_status.read(run_dir)]
                run.gone.write_text("2\n")
                began = time.perf_counter()
                hosts.kill(2)
                resumed = run.wait_for_ranks(other_than=pids)
                run.wait_for_step(max(rank.step for rank in resumed) + 1, poll_s=0.0005)
                seconds[kind].append(time.perf_counter() - began)
                run.process.send_signal(signal.SIGINT)
                run.process.wait(60)
                run.assert_nothing_is_left()
    times = "; ".join(
        f"{kind} {statistics.median(each):.2f} s ({min(each):.2f} to {max(each):.2f} s)"
        for kind, each in seconds.items()
    )
    print(f"{name}, from the loss of a host to the next step, {losses} times each: {times}", flush=True)


def _large() -> tuple[str, ...]:
    data = "/usr/share/datasets/fashion-mnist"
    return ("--data-dir", data, "--hidden", "9500", "--layers", "2", "--batch-size", "16")


def _cpu() -> str:
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return names[0].partition(":")[2].strip() if names else platform.machine()


if __name__ == "__main__":
    main()
