"""Stragglers, predicted before the measurement: steps/s with one slow worker of four, by its factor and the mode.

    python bench/straggler_campaign.py predict bench/predicted/stragglers.json
    python bench/straggler_campaign.py measure bench/predicted/stragglers.json [--rounds 3]

``predict`` probes ``jobs/accelerator.py`` on four ranks of this machine, without a slow worker, and writes the
predictions of the simulation. ``measure`` runs the same configurations, and compares. The layers of the model sleep, so
four ranks hardly compete for this machine's cores.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from environment import one_thread_and_own_kernels, use_this_checkout

JOB = Path(__file__).parent / "jobs" / "accelerator.py"
WORKERS, SLOW = 4, 3
FACTORS = (1.0, 1.25, 3.0, 6.0)
MODES: dict[str, dict[str, Any]] = {
    "sync": {"mode": "sync"},
    "async": {"mode": "async"},
    "ssp, staleness 2": {"mode": "ssp", "staleness": 2},
    "backup, 1 spare": {"mode": "backup", "backup_workers": 1},
    "local, 8 steps": {"mode": "local", "local_steps": 8},
}
REPORTS = 8
SECONDS = 4.0
SLEEP_S = 18 * 1e-3  # of a step of the job: the part that takes longer on a slow worker


def start(*words: object) -> None:
    """Run an mpitrain command, which must succeed."""
    command = [sys.executable, "-m", "mpitrain", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")


def slowed(probe: Any, factor: float) -> float:
    """Return the factor of a worker's computing time if its sleep is multiplied by ``factor``."""
    compute = probe.compute
    index = compute.batches.index(probe.job.batch)
    return 1 + (factor - 1) * SLEEP_S / (compute.forward_s[index] + compute.backward_s[index])


def predictions() -> dict[str, dict[str, float]]:
    """Return predicted steps/s by mode and factor."""
    from mpitrain.plan.config import RunConfig
    from mpitrain.predict.measurements import read_probe
    from mpitrain.predict.scenario import scenario_of
    from mpitrain.predict.simulation import predict

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "probe.json")
        start("probe", "-n", WORKERS, "--threads", 1, "-o", file, JOB)
        probe = read_probe(file)
    speeds: dict[str, dict[str, float]] = {}
    for mode, options in MODES.items():
        made = dataclasses.replace(scenario_of(probe, RunConfig.of(**options)), cores_per_node=WORKERS)
        speeds[mode] = {
            str(factor): float(
                predict(probe, dataclasses.replace(made, slow={SLOW: slowed(probe, factor)})).steps_per_s
            )
            for factor in FACTORS
        }
    return speeds


def measured(mode: str, factor: float, expected: float) -> float:
    """Return measured steps/s; ``expected`` steps/s determine the number of steps."""
    options = MODES[mode]
    every = REPORTS * options.get("local_steps", 1)
    steps = max(3, round(expected * SECONDS / every)) * every
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    with tempfile.TemporaryDirectory() as folder:
        words = ["run", "-n", WORKERS, "--threads", 1, *flags, "--train-steps", steps, "--log-steps", steps // REPORTS]
        words += ["--validate-steps", 0, "--no-tensorboard", "--run-dir", folder, JOB]
        start(*words, "--slow-worker", SLOW, "--slow-factor", factor)
        lines = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
    logged = [line for line in lines if "examples_per_s" in line]
    times = [(b["time_s"] - a["time_s"]) / (b["step"] - a["step"]) for a, b in itertools.pairwise(logged)]
    return 1 / statistics.median(times)


def compare(predicted: dict[str, dict[str, float]], rounds: int) -> None:
    """Measure every configuration in each round, and print the predicted and the measured speeds."""
    speeds: dict[tuple[str, float], list[float]] = defaultdict(list)
    for _ in range(rounds):
        for mode, factor in ((mode, float(factor)) for mode, of_mode in predicted.items() for factor in of_mode):
            speeds[mode, factor].append(measured(mode, factor, predicted[mode][str(factor)]))
            print(f"{mode}, {factor:g} times slower: {speeds[mode, factor][-1]:.2f} steps/s", flush=True)
    errors = []
    print(f"{'mode':18} {'slower':>7} {'predicted':>10} {'measured':>10} {'error':>8}   (steps/s)")
    for (mode, factor), values in speeds.items():
        speed = statistics.median(values)
        errors.append(predicted[mode][str(factor)] / speed - 1)
        print(f"{mode:18} {factor:7g} {predicted[mode][str(factor)]:10.2f} {speed:10.2f} {errors[-1]:+8.1%}")
    sizes = np.abs(errors)
    print(f"error: median {np.median(sizes):.1%}, 90 % within {np.quantile(sizes, 0.9):.1%}, worst {sizes.max():.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["predict", "measure"])
    parser.add_argument("file", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    one_thread_and_own_kernels()
    use_this_checkout()
    load = os.getloadavg()[0]
    if arguments.what == "predict":
        predicted = predictions()
        arguments.file.write_text(json.dumps({"load": load, "steps_per_s": predicted}, indent=1) + "\n")
        return
    print(f"load before: {load:.2f}")
    compare(json.loads(arguments.file.read_text())["steps_per_s"], arguments.rounds)


if __name__ == "__main__":
    main()
