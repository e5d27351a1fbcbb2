"""Local SGD between hosts over slow links: bytes, seconds and accuracy, against ``sync`` and DiLoCo of torchft.

    python bench/diloco.py [--rate 100mbit] [--hosts 2] [--hidden 100] [--steps 3000] [--seeds 3]
        [--programs sync diloco streaming diloco+int8 torchft] [--torchft PYTHON]

Hosts are network namespaces on this machine (root, iproute2), with one rank each; ``tbf`` limits the rate of every
link. The job is ``jobs/mnist_mlp.py`` on Fashion-MNIST: 784-hidden-10, Adam, 100 examples for each rank and step. All
programs take the same number of steps, so that they train on the same number of examples. For each seed every program
runs once, in turn.

A result has:

- the seconds for all steps: the median time of a step over intervals of ``--every`` steps, times the number of steps;
- the megabytes that all hosts have sent during the whole run, including its start;
- the accuracy on the 10,000 test images.

``learners`` are runs with ``--join``, one on each host, whose folder a further host serves over a link of the same rate
(sshfs, openssh-sftp-server).

``torchft`` and ``torchft-overlap`` need ``--torchft``, the Python interpreter of an environment with torch and torchft.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from environment import ROOT, one_thread_and_own_kernels, use_this_checkout

BENCH = Path(__file__).parent
OVERLAP = 4  # an exchange overlaps with about 1 / OVERLAP of the steps of a cycle


class Result(NamedTuple):
    """The seconds for all steps of a run, the megabytes that all hosts have sent, and the accuracy in percent."""

    seconds: float
    megabytes: float
    accuracy: float


class Programs:
    """Hosts whose links have the same rate, and the programs that run on the hosts."""

    def __init__(self, hosts: object, arguments: argparse.Namespace) -> None:
        self._hosts, self._arguments = hosts, arguments

    def run(self, program: str, seed: int) -> Result:
        """Run a program."""
        before = self._bytes_sent()
        kinds = {"learners": self._learners, "torchft": self._torchft, "torchft-overlap": self._torchft}
        run = kinds.get(program, self._ours)
        step_s, accuracy = run(program, seed)
        megabytes = (self._bytes_sent() - before) / 1e6
        return Result(statistics.median(step_s) * self._arguments.steps, megabytes, 100 * accuracy)

    def _ours(self, program: str, seed: int) -> tuple[list[float], float]:
        arguments = self._arguments
        words = self._hosts.run(sys.executable, [1] * arguments.hosts, "--env", "OMPI_MCA_mpi_yield_when_idle=1")
        words += [*flags_of(program, arguments.every), "--threads", "1", "--log-steps", str(arguments.every)]
        words += ["--train-steps", str(arguments.steps), "--validate-steps", "0", "--seed", str(seed)]
        job = [str(ROOT / "jobs" / "mnist_mlp.py"), "--data-dir", arguments.data]
        with tempfile.TemporaryDirectory() as folder:
            words += ["--run-dir", f"{folder}/run", *job, "--hidden-units", str(arguments.hidden)]
            environment = {**os.environ, **self._hosts.environment}
            done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=1800)
            if done.returncode:
                raise SystemExit(done.stdout + done.stderr)
            return measured(Path(folder, "run"))

    def _learners(self, program: str, seed: int) -> tuple[list[float], float]:
        from tests.support.hosts.shared_folder import share

        arguments, hosts, every = self._arguments, self._hosts, self._arguments.every
        numbers = list(range(1, arguments.hosts + 1))
        with tempfile.TemporaryDirectory() as folder, share(hosts, Path(folder), numbers[-1] + 1, numbers) as shared:
            words = [sys.executable, "-m", "mpitrain", "run", "-n", 1, "--threads", 1]
            words += ["--log-steps", 10 * every]  # each report is a write to the file system
            words += ["--train-steps", arguments.hosts * arguments.steps, "--validate-steps", 0, "--seed", seed]
            words += ["--join", shared.mounted / "run", "--local-steps", every]
            job = ROOT / "jobs" / "mnist_mlp.py", "--data-dir", arguments.data, "--hidden-units", arguments.hidden
            own = [("--run-dir", shared.mounted / "run" / "learners" / str(number)) for number in numbers]
            started = [
                subprocess.Popen(shared.on(number, *words, *run_dir, *job), stdout=subprocess.DEVNULL)
                for number, run_dir in zip(numbers, own, strict=True)
            ]
            statuses = [process.wait(1800) for process in started]
            if any(statuses):
                raise SystemExit(f"{program} has failed")
            return measured(shared.served / "run" / "learners" / "1")

    def _torchft(self, program: str, seed: int) -> tuple[list[float], float]:
        arguments, addresses = self._arguments, [f"{self._hosts.net}.{i + 1}" for i in range(self._arguments.hosts)]
        delay = arguments.every // OVERLAP if program == "torchft-overlap" else 0
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
        environment["RUST_LOG"] = "error"
        ranks = []
        for rank, address in enumerate(addresses):
            words = ["ip", "netns", "exec", f"{self._hosts.prefix}{rank + 1}", arguments.torchft]
            words += [str(BENCH / "peers" / "torchft_diloco.py"), str(rank), str(len(addresses)), addresses[0], address]
            words += map(str, (arguments.hidden, arguments.steps, arguments.every, delay, seed, arguments.data))
            ranks.append(subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True))
        out, _ = ranks[0].communicate(timeout=1800)
        for process in ranks:
            process.kill()
            process.wait()
        if not out:
            raise SystemExit(f"{program} has failed")
        result = json.loads(out.splitlines()[-1])
        return result["step_s"], result["accuracy"]

    def _bytes_sent(self) -> int:
        """Return the number of bytes that all hosts have sent so far."""
        words = ["cat", "/sys/class/net/eth0/statistics/tx_bytes"]
        spaces = [f"{self._hosts.prefix}{number + 1}" for number in range(count_of_hosts(self._arguments))]
        texts = [subprocess.check_output(["ip", "netns", "exec", space, *words]) for space in spaces]
        return sum(map(int, texts))


def count_of_hosts(arguments: argparse.Namespace) -> int:
    """Return the number of hosts, with the one that serves the folder of learners."""
    return arguments.hosts + ("learners" in arguments.programs)


def measured(run_dir: Path) -> tuple[list[float], float]:
    """Return the seconds of a step in each interval of a run but the first, and its last accuracy."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    accuracy = [line["validation_accuracy"] for line in lines if "validation_accuracy" in line][-1]
    return [line["step_s"] for line in lines if "step_s" in line][1:], accuracy


def flags_of(program: str, every: int) -> list[str]:
    """Return the flags of ``mpitrain run`` for a program, such as ``diloco+int8``."""
    name, _, codec = program.partition("+")
    local = ["--mode", "local", "--local-steps", str(every)]
    outer = [*local, "--outer-optimizer", "nesterov"]
    flags = {
        "sync": [],
        "local": local,
        "diloco": outer,
        "overlap": [*outer, "--overlap-steps", str(every // OVERLAP)],
        "streaming": [*outer, "--fragments", str(OVERLAP), "--overlap-steps", str(every // OVERLAP - 1)],
        "post-local": [*local, "--local-after", str(8 * every)],
    }
    return [*flags[name], *(["--compress", codec] if codec else [])]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rate", default="100mbit", help="rate of the links, as tc takes it; empty for no limit")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=100)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--every", type=int, default=60, help="steps between exchanges, and between reports")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--programs", nargs="+", default=["sync", "local", "diloco", "overlap", "streaming"])
    parser.add_argument("--torchft", default=sys.executable, metavar="PYTHON")
    parser.add_argument("--data", default="/usr/share/datasets/fashion-mnist")
    arguments = parser.parse_args()
    one_thread_and_own_kernels()
    use_this_checkout()
    from tests.support.hosts.network import make_hosts

    results: dict[str, list[Result]] = defaultdict(list)
    with make_hosts(Path(sys.executable), count_of_hosts(arguments), arguments.rate) as hosts:
        programs = Programs(hosts, arguments)
        for seed in range(arguments.seeds):
            for program in arguments.programs:
                results[program].append(programs.run(program, seed))
                print(program, seed, *results[program][-1], file=sys.stderr, flush=True)
    first = [statistics.median(column) for column in zip(*results[arguments.programs[0]], strict=True)]
    print(f"{'':16} seconds          megabytes        accuracy (mean over seeds, each)")
    for program, runs in results.items():
        seconds, megabytes, _ = (statistics.median(column) for column in zip(*runs, strict=True))
        each = [run.accuracy for run in runs]
        ratios = f"{seconds:8.2f} ({first[0] / seconds:5.1f}x) {megabytes:8.1f} ({first[1] / megabytes:5.1f}x)"
        print(f"{program:16} {ratios} {statistics.mean(each):6.2f}  {' '.join(f'{value:.2f}' for value in each)}")


if __name__ == "__main__":
    main()
