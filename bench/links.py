"""Training between hosts over slow links, against DistributedDataParallel: examples per second of all ranks.

    python bench/links.py [--hosts 2] [--rates 200mbit 1gbit none] [--models mlp1024] [--rounds 3] [--programs sync ddp]

Hosts are network namespaces on this machine (root, iproute2), with one rank each; ``tbf`` limits the rate of every
link. In each round every program runs once, in turn; a result is the median over rounds of the median over a run's
intervals.

- ``limit``: the speed if a step takes as long as its transfers, or as long as a step of one rank alone, if that is
  longer. In this calculation, every rank sends and receives the gradient and then the parameters, except its own part.
  The rate is that of a TCP connection over the same link.
- ``ddp``, ``ddp-powersgd``: DistributedDataParallel over gloo, with uncompressed gradients or with PowerSGD of rank
  4; both use fused Adam.
- ``async``: with one server on the first host.
- ``far``: ``async`` with one worker, whose server is on another host. The limit is the transfer of a gradient and then
of the parameters.
- All other names, except ``sync``, are flags of ``mpitrain run``, such as ``--compress=int8``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from functools import partial
from pathlib import Path

from environment import one_thread_and_own_kernels, use_this_checkout

BENCH = Path(__file__).parent
DATA = "/usr/share/datasets/fashion-mnist"
MODELS = {"mlp1024": (1024, 1), "mlp30m": (5120, 2)}
BATCH = 100


def size_of(model: str) -> int:
    """Return the number of parameters."""
    hidden, layers = MODELS[model]
    return 784 * hidden + (layers - 1) * hidden * hidden + layers * hidden + hidden * 10 + 10


def steps_of(model: str, rate: str) -> int:
    """Return the number of steps that take about 8 s, a multiple of 8 and at least 16."""
    speed = {"100mbit": 12e6, "200mbit": 24e6, "1gbit": 120e6}.get(rate, 600e6)
    step_s = max(8 * size_of(model) / 2 / speed, 60e-12 * BATCH * size_of(model))
    return max(16, int(8 / step_s) // 8 * 8)


class Links:
    """Hosts whose links have the same rate, and the programs that run on the hosts."""

    def __init__(self, hosts: object, count: int, rate: str) -> None:
        self._hosts, self._count, self._rate = hosts, count, rate

    def bandwidth(self) -> float:
        """Return bytes per second of a TCP connection from the first to the second host."""
        address, mib = f"{self._hosts.net}.2", {"none": "2000", "1gbit": "200"}.get(self._rate, "40")
        receiver = self._start(2, "receive", address, mib)
        sender = self._start(1, "send", address, mib)
        sender.wait(300)
        return float(json.loads(receiver.communicate(timeout=300)[0]))

    def ddp(self, model: str, powersgd: int) -> float:
        hidden, layers = MODELS[model]
        words = [self._count, f"{self._hosts.net}.1", hidden, layers, steps_of(model, self._rate), DATA, powersgd]
        ranks = [self._start(rank + 1, "ddp", rank, *words) for rank in range(self._count)]
        rates = json.loads(ranks[0].communicate(timeout=600)[0].splitlines()[-1])
        for process in ranks:
            process.wait(60)
        return statistics.median(rates)

    def ours(self, model: str, flags: list[str]) -> float:
        ranks = [1] * self._count
        if "async" in flags:
            ranks[0] += 1
        return self._rate_of(model, flags, ranks)

    def far(self, model: str, flags: list[str]) -> float:
        """Return examples/s of one worker whose server is on another host."""
        return self._rate_of(model, ["--mode", "async", "--ps", "1", *flags], [1, 1])

    def _rate_of(self, model: str, flags: list[str], ranks: list[int]) -> float:
        hidden, layers = MODELS[model]
        with tempfile.TemporaryDirectory() as folder:
            workers = sum(ranks) - ("async" in flags)
            steps = steps_of(model, self._rate) * (workers if "async" in flags else 1)
            words = self._hosts.run(sys.executable, ranks, "--env", "OMPI_MCA_mpi_yield_when_idle=1", "--threads", "1")
            words += [*flags, "--log-steps", str(steps // 8), "--save-secs", "0", "--run-dir", f"{folder}/run"]
            words += [str(BENCH / "jobs" / "links.py"), "--data-dir", DATA, "--hidden", str(hidden)]
            words += ["--layers", str(layers), "--train-steps", str(steps)]
            environment = {**os.environ, **self._hosts.environment}
            done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=900)
            if done.returncode:
                raise SystemExit(done.stdout + done.stderr)
            lines = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
        return statistics.median([line["examples_per_s"] for line in lines if "examples_per_s" in line][1:])

    def alone(self, model: str) -> float:
        """Return examples/s of a rank that does not communicate."""
        return Links(self._hosts, 1, self._rate).ours(model, [])

    def _start(self, host: int, *words: object) -> subprocess.Popen[str]:
        command = ["ip", "netns", "exec", f"{self._hosts.prefix}{host}", sys.executable]
        command += [str(BENCH / "peers" / "links.py"), *map(str, words)]
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0"}
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def measure(links: Links, count: int, rate: str, model: str, programs: list[str], rounds: int) -> None:
    runs = {
        "ddp": lambda: links.ddp(model, 0),
        "ddp-powersgd": lambda: links.ddp(model, 4),
        "sync": lambda: links.ours(model, []),
        "async": lambda: links.ours(model, ["--mode", "async", "--ps", "1"]),
    }
    results: dict[str, list[float]] = defaultdict(list)
    bandwidths, alone = [], []
    for _ in range(rounds):
        bandwidths.append(links.bandwidth())
        alone.append(links.alone(model))
        for program in programs:
            run = runs.get(program) or (lambda flags=program: links.ours(model, flags.split()))
            if program.split()[0] == "far":
                run = partial(links.far, model, program.split()[1:])
            results[program].append(run())
    bandwidth = statistics.median(bandwidths)
    transfer_s = 2 * 4 * size_of(model) * (count - 1) / count / bandwidth
    limit = count * BATCH / max(transfer_s, BATCH / statistics.median(alone))
    print(f"\n{model}, {count} hosts, {rate}: {bandwidth / 1e6:,.0f} MB/s; limit {limit:,.0f} examples/s, without")
    print(f"communication {count * statistics.median(alone):,.0f}")
    reference = statistics.median(results["ddp"]) if "ddp" in results else limit
    far_limit = BATCH * bandwidth / (2 * 4 * size_of(model))
    for program, rates in results.items():
        rate_ = statistics.median(rates)
        if program.split()[0] == "far":
            print(f"{program:24} {rate_:10,.0f}  {far_limit / rate_:.2f} of the time of the transfers")
            continue
        spread = f"({min(rates):,.0f} to {max(rates):,.0f})"
        print(
            f"{program:24} {rate_:10,.0f}  {rate_ / reference:6.2f} of ddp  {rate_ / limit:6.2f} of the limit  {spread}"
        )
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--rates", nargs="+", default=["200mbit", "1gbit", "none"])
    parser.add_argument("--models", nargs="+", default=["mlp1024"], choices=MODELS)
    parser.add_argument("--programs", nargs="+", default=["sync", "ddp", "ddp-powersgd", "async"])
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    one_thread_and_own_kernels()
    use_this_checkout()
    from tests.support.hosts.network import make_hosts

    for rate in arguments.rates:
        with make_hosts(Path(sys.executable), arguments.hosts, "" if rate == "none" else rate) as hosts:
            links = Links(hosts, arguments.hosts, rate)
            for model in arguments.models:
                with contextlib.suppress(KeyboardInterrupt):
                    measure(links, arguments.hosts, rate, model, arguments.programs, arguments.rounds)


if __name__ == "__main__":
    main()
