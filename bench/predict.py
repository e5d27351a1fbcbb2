"""Predicted against measured speed: ``mpitrain simulate`` from a probe on two hosts, and real runs.

    python bench/predict.py [--rounds 3] [--rates 100mbit 1gbit none] [--models mlp accelerator] [--only TEXT]
                            [--seconds 4] [--json FILE] [--probes FOLDER]

Hosts are network namespaces on this machine (root, iproute2), whose links ``tbf`` limits to a rate. In each round,
every model is probed on two hosts with one rank each and unlimited links; then every configuration runs once. The probe
has no information about the rate of the links, the third host, the mode, compression, servers, other batch sizes, and
the slow worker. The factor of the slow worker is measured separately. A result is the median over rounds of the steps/s
that the round's probe predicts, and of the measured steps/s. Measurements that other programs disturb are repeated.

Configurations with more ranks than cores are reported separately. For ``mlp``, the simulation divides this machine's
cores among the hosts. For ``accelerator``, it assumes a core for every rank, because the layers sleep, and ranks
compete for cores only in transfers and updates.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from environment import one_thread_and_own_kernels, use_this_checkout
from other_programs import undisturbed

BENCH = Path(__file__).parent
DATA = "/usr/share/datasets/fashion-mnist"
JOBS = {
    "mlp": [str(BENCH / "jobs" / "links.py"), "--data-dir", DATA, "--hidden", "1024"],
    "accelerator": [str(BENCH / "jobs" / "accelerator.py")],
}
# tc counts the frame without preamble and checksum; its mb is 2**20.
PAYLOAD = 1448 / 1514
BURST = PAYLOAD * (1 << 20)
RATES = {"100mbit": 100e6 / 8, "300mbit": 300e6 / 8, "1gbit": 1e9 / 8}
SLOW_FACTOR = 3.0
CORES = len(os.sched_getaffinity(0))


@dataclass(frozen=True)
class Configuration:
    """A run: its model, ranks of each host, rate, options of the run, and the index of a slow worker, -1 for none."""

    model: str
    ranks: tuple[int, ...]
    rate: str
    options: tuple[tuple[str, Any], ...]
    slow: int = -1

    @property
    def shares_cores(self) -> bool:
        return sum(self.ranks) > CORES

    def __str__(self) -> str:
        options = " ".join(f"{name}={value}" for name, value in self.options)
        slow = f", worker {self.slow} slow" if self.slow >= 0 else ""
        return f"{self.model} {'+'.join(map(str, self.ranks))} {self.rate} {options}{slow}"


Result = TypeVar("Result")
Results = dict[Configuration, list[tuple[float, float]]]  # predicted and measured steps/s of each round


def configurations() -> Iterator[Configuration]:
    """Yield the configurations to measure."""

    def of(model: str, ranks: tuple[int, ...], rate: str, slow: int = -1, **options: Any) -> Configuration:
        return Configuration(model, ranks, rate, tuple(options.items()), slow)

    for model in JOBS:
        for rate in (*RATES, "none"):
            two = (1, 1)
            yield of(model, two, rate, mode="sync")
            yield of(model, two, rate, mode="sync", compress="int8")
            yield of(model, two, rate, mode="local", local_steps=8)
            yield of(model, two, rate, mode="async", ps=1)
            if rate != "none":
                yield of(model, two, rate, mode="sync", compress="powersgd:4")
                yield of(model, two, rate, mode="ssp", ps=1, compress="bfloat16")
            yield of(model, (2, 1), rate, mode="async", ps=1, compress="int8")
            yield of(model, (2, 1), rate, mode="backup", ps=1, backup_workers=0)
            yield of(model, (1, 1, 1), rate, mode="sync")
            yield of(model, (2, 2), rate, mode="sync")
    for model in JOBS:
        yield of(model, (1,), "none", mode="sync")
        yield of(model, (2,), "none", mode="sync")
        yield of(model, (2,), "none", mode="async")
        yield of(model, (2,), "none", mode="ssp", staleness=1)
        yield of(model, (2,), "none", mode="backup", backup_workers=1)
        yield of(model, (2,), "none", mode="local", local_steps=8)
        yield of(model, (1, 1), "1gbit", mode="sync", batch_size=32)
        yield of(model, (1, 1), "1gbit", mode="local", local_steps=8, outer_optimizer="nesterov", compress="int8")
    slow = "accelerator"
    yield of(slow, (1, 1), "1gbit", 1, mode="sync")
    yield of(slow, (2, 2), "1gbit", 3, mode="sync")
    yield of(slow, (2, 1, 1), "1gbit", 2, mode="async", ps=1)
    yield of(slow, (2, 1, 1), "1gbit", 2, mode="ssp", ps=1, staleness=2)
    yield of(slow, (2, 1, 1), "1gbit", 2, mode="backup", ps=1, backup_workers=1)
    yield of(slow, (4,), "none", 3, mode="backup", backup_workers=1)
    yield of(slow, (4,), "none", 3, mode="local", local_steps=8)


class Hosts:
    """Hosts with links of one rate, and the programs that run on them.

    Args:
        hosts: The network namespaces.
        seconds: Approximate duration of a run.
    """

    def __init__(self, hosts: Any, seconds: float) -> None:
        self._hosts, self._seconds = hosts, seconds

    def probe(self, model: str, folder: Path | None) -> Any:
        """Return the probe of a model on the first two hosts; ``folder`` stores probes for later calls."""
        from mpitrain.predict.measurements import read_probe

        if folder is not None:
            folder.mkdir(exist_ok=True)
            file = folder / f"{model}.json"
            if not file.exists():
                self.undisturbed(lambda: self._probe(model, file))
            return read_probe(file)
        with tempfile.TemporaryDirectory() as made:
            return self.probe(model, Path(made))

    def _probe(self, model: str, output: Path) -> None:
        self.run("probe", [1, 1], ["--output", str(output), *JOBS[model]])

    def slow_factor(self, model: str, probe: Any) -> float:
        """Return how many times longer a slow worker computes; measured in runs of one worker."""
        alone = Configuration(model, (1,), "none", (("mode", "sync"),))
        usual, slow = (1 / self.steps_per_s(dataclasses.replace(alone, slow=worker), 20.0) for worker in (-1, 0))
        compute = probe.compute
        index = compute.batches.index(probe.job.batch)
        return 1 + (slow - usual) / (compute.forward_s[index] + compute.backward_s[index])

    def steps_per_s(self, configuration: Configuration, expected: float) -> float:
        """Return the measured steps/s; ``expected`` steps/s determine the number of steps."""
        return self.undisturbed(lambda: self._steps_per_s(configuration, expected))

    def _steps_per_s(self, configuration: Configuration, expected: float) -> float:
        options = dict(configuration.options)
        every = 8 * options.get("local_steps", 1)
        steps = min(20_000, max(3, round(expected * self._seconds / every))) * every
        with tempfile.TemporaryDirectory() as folder:
            flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
            words = [*flags, "--log-steps", str(steps // 8), "--train-steps", str(steps), "--validate-steps", "0"]
            slow = (
                ["--slow-worker", str(rank_of_worker(configuration)), "--slow-factor", str(SLOW_FACTOR)]
                if configuration.slow >= 0
                else []
            )
            words += ["--no-tensorboard", "--run-dir", f"{folder}/run", *JOBS[configuration.model], *slow]
            self.run("run", list(configuration.ranks), words)
            lines = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
        logged = [line for line in lines if "examples_per_s" in line]
        times = [(b["time_s"] - a["time_s"]) / (b["step"] - a["step"]) for a, b in itertools.pairwise(logged)]
        return 1 / statistics.median(times)

    def run(self, command: str, ranks: list[int], words: list[str]) -> None:
        """Run, on the first hosts, an mpitrain command that takes the flags of ``mpitrain run``."""
        start = self._hosts.run(
            Path(sys.executable), ranks, "--env", "OMPI_MCA_mpi_yield_when_idle=1", "--threads", "1"
        )
        start[start.index("run", start.index("mpitrain"))] = command
        environment = {**os.environ, **self._hosts.environment}

        done = subprocess.run([*start, *words], env=environment, capture_output=True, text=True, timeout=600)
        if done.returncode:
            raise SystemExit(f"{' '.join(words)}\n{done.stdout}{done.stderr}")

    def undisturbed(self, measure: Callable[[], Result]) -> Result:
        """Return the result of ``measure``, which is repeated if other programs have used the CPU meanwhile."""
        return undisturbed(measure, self._hosts.prefix)


def scenario_for(configuration: Configuration, probe: Any, slow: float) -> Any:
    """Return the scenario of a configuration, with the cores and links of the test hosts.

    Args:
        slow: Factor of the slow worker's computing time.
    """
    from mpitrain.plan.config import RunConfig
    from mpitrain.predict.scenario import scenario_of, shaped

    options = dict(configuration.options)
    batch = options.pop("batch_size", None)
    scenario = scenario_of(probe, RunConfig.of(**options), configuration.ranks, batch)
    computes = configuration.model == "mlp"
    changes: dict[str, Any] = {"cores_per_node": CORES / len(configuration.ranks) if computes else math.inf}
    if configuration.rate != "none":
        rate = RATES[configuration.rate] * PAYLOAD
        changes |= {"between": shaped(scenario.between, rate, BURST), "limits_receiver": False}
    if configuration.slow >= 0:
        changes["slow"] = {configuration.slow: slow}
    return dataclasses.replace(scenario, **changes)


def rank_of_worker(configuration: Configuration) -> int:
    """Return the rank of the slow worker."""
    from mpitrain.plan.config import RunConfig
    from mpitrain.predict.measurements import LinkTimes
    from mpitrain.predict.scenario import Scenario

    link, options = LinkTimes(0, 0, 1, 1, 0, 0), dict(configuration.options)
    options.pop("batch_size", None)
    return Scenario(RunConfig.of(**options), configuration.ranks, 1, 1, link, link).workers[configuration.slow]


def measure(arguments: argparse.Namespace, chosen: list[Configuration]) -> Results:
    """Return predicted and measured steps/s by configuration, a pair for each round."""
    from mpitrain.predict.simulation import predict
    from tests.support.hosts.network import make_hosts

    results: Results = defaultdict(list)
    models = {one.model for one in chosen if one.rate in arguments.rates}
    for _ in range(arguments.rounds):
        with make_hosts(Path(sys.executable), 2) as network:
            probes = {model: Hosts(network, 0).probe(model, arguments.probes) for model in models}
            slow = {one.model for one in chosen if one.rate in arguments.rates and one.slow >= 0}
            factors = {model: Hosts(network, 2).slow_factor(model, probes[model]) for model in slow}
        for rate in arguments.rates:
            with make_hosts(Path(sys.executable), 3, "" if rate == "none" else rate) as network:
                hosts = Hosts(network, arguments.seconds)
                for one in (one for one in chosen if one.rate == rate):
                    probe, factor = probes[one.model], factors.get(one.model, 1.0)
                    predicted = predict(probe, scenario_for(one, probe, factor)).steps_per_s
                    measured = hosts.steps_per_s(one, predicted)
                    results[one].append((predicted, measured))
                    if arguments.json is not None:
                        add_to(arguments.json, one, (predicted, measured))
                    print(f"{one!s:75} {predicted:10.2f} {measured:10.2f} {predicted / measured - 1:+8.1%}", flush=True)
    return results


def add_to(file: Path, one: Configuration, speeds: tuple[float, float]) -> None:
    """Add a prediction and a measurement to a file."""
    kept = json.loads(file.read_text()) if file.exists() else {}
    kept.setdefault(str(one), []).append(speeds)
    file.write_text(json.dumps(kept, indent=1) + "\n")


def read_results(file: Path) -> Results:
    """Return the predictions and measurements in a file."""
    kept = json.loads(file.read_text())
    return {one: kept[str(one)] for one in configurations() if str(one) in kept}


def report(results: Results) -> None:
    """Print the table; and the errors of configurations with and without more ranks than cores."""
    errors: dict[bool, list[float]] = defaultdict(list)
    print(f"\n{'configuration':75} {'predicted':>10} {'measured':>10} {'error':>8}   (steps/s)")
    for one, rounds in results.items():
        predicted, measured = (statistics.median(values) for values in zip(*rounds, strict=True))
        errors[one.shares_cores].append(predicted / measured - 1)
        print(f"{one!s:75} {predicted:10.2f} {measured:10.2f} {errors[one.shares_cores][-1]:+8.1%}")
    for shares, values in sorted(errors.items()):
        sizes = np.abs(values)
        group = "more ranks than cores" if shares else "a core for each rank"
        print(
            f"\n{group}: {len(values)} configurations, error: median {np.median(sizes):.1%}, 90 % within "
            f"{np.quantile(sizes, 0.9):.1%}, worst {sizes.max():.1%}, mean {np.mean(values):+.1%}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rates", nargs="+", default=[*RATES, "none"], choices=[*RATES, "none"])
    parser.add_argument("--models", nargs="+", default=[*JOBS], choices=JOBS)
    parser.add_argument("--only", default="", help="only configurations whose line contains this text")
    parser.add_argument("--seconds", type=float, default=4.0, help="approximate duration of each run")
    parser.add_argument("--probes", type=Path, help="folder for the probes; probes of earlier calls are reused")
    parser.add_argument("--json", type=Path, help="add the results to this file; report all results in it")
    arguments = parser.parse_args()
    one_thread_and_own_kernels()
    use_this_checkout()
    chosen = [one for one in configurations() if one.model in arguments.models and arguments.only in str(one)]
    print(f"load before: {os.getloadavg()[0]:.2f}, {CORES} cores", flush=True)
    results = measure(arguments, chosen)
    report(results if arguments.json is None else read_results(arguments.json))
    print(f"load afterwards: {os.getloadavg()[0]:.2f}")


if __name__ == "__main__":
    main()
