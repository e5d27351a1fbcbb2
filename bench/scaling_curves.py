"""Predict the plots and the table of docs/scaling.md: three models over links of 1 to 400 Gbit/s.

    python bench/scaling_curves.py [--output docs/scaling]

The times of the models are assumptions, stated in ``MODELS``. They are for an accelerator (ResNet-50, the GPT) or for
one CPU core (the small perceptron). ``mpitrain probe`` measures those of a real job.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from anchors import layers_of, simulated_step_s  # noqa: E402

from mpitrain.core.toml import read_toml  # noqa: E402
from mpitrain.plan.config import RunConfig  # noqa: E402
from mpitrain.predict.measurements import (  # noqa: E402
    VERSION,
    CodecTimes,
    ComputeTimes,
    JobFacts,
    LinkTimes,
    Noise,
    Probe,
    RankFacts,
    ServerTimes,
)
from mpitrain.predict.scenario import Scenario, parse_rate, scenario_of, shaped  # noqa: E402
from mpitrain.predict.simulation import predict  # noqa: E402
from mpitrain.report.images import SpeedCurve, write_scaling  # noqa: E402

LINKS = ("1gbit", "10gbit", "100gbit", "400gbit")
NODES = (1, 2, 4, 8, 16, 32, 64, 128)
RANKS_PER_NODE = 8
SPREAD = 0.03  # sigma of the lognormal distribution of step times
# Seconds of a step's forward and backward pass, examples, bytes per second of memory, layers as (elements, share).
HARDWARE = read_toml(ROOT / "bench" / "predicted" / "hardware.toml")
MODELS: dict[str, dict[str, Any]] = {
    "MLP": {"compute_s": 3.6e-3, "batch": 100, "memory": 10e9, "layers": [(803_840, 0.98), (10_250, 0.02)]},
    "ResNet-50": {
        "compute_s": 64 / 800,
        "batch": 64,
        "memory": 1.2e12,
        "layers": [(1e6 * millions, share) for millions, share in layers_of(HARDWARE["models"]["resnet50"])],
    },
    # 6 operations per parameter and token, 8,192 tokens, at 1e14 operations/s.
    "GPT": {
        "compute_s": 6 * 100e6 * 8192 / 1e14,
        "batch": 8,
        "memory": 1.2e12,
        "layers": [(25e6, 0.05), *[(6.25e6, 0.95 / 12)] * 12],
    },
}
MODES: dict[str, dict[str, Any]] = {
    "sync": {"mode": "sync"},
    "sync, int8": {"mode": "sync", "compress": "int8"},
    "local, 8 steps": {"mode": "local", "local_steps": 8},
    "DiLoCo, 64 steps, int8": {"mode": "local", "local_steps": 64, "outer_optimizer": "nesterov", "compress": "int8"},
    "async": {"mode": "async"},
    "backup": {"mode": "backup"},
}


def probe_of(name: str) -> Probe:
    """Return the measurements that a probe of a model would give."""
    model = MODELS[name]
    sizes = [round(elements) for elements, _ in model["layers"]]
    elements, nbytes = sum(sizes), 4 * sum(sizes)
    done = list(accumulate(share for _, share in reversed(model["layers"])))
    ready = tuple(reversed([min(1.0, share / done[-1]) for share in done]))
    pass_s = nbytes / model["memory"]  # to read or write one vector
    update_s = 7 * pass_s  # Adam reads four vectors and writes three
    forward_s = model["compute_s"] / 3
    batches = (model["batch"] // 2, model["batch"])
    compute = ComputeTimes(
        batches, (0.0, 0.0), (forward_s / 2, forward_s), (forward_s, 2 * forward_s), 1.0, (1, 8),
        (update_s, update_s + 7 * pass_s), 2 * pass_s, 0.0, 50e-6,
    )  # fmt: skip
    sigma = [math.exp(SPREAD * x) for x in (-1.65, -1.04, -0.67, -0.39, -0.13, 0.13, 0.39, 0.67, 1.04, 1.65)]
    starts = tuple(accumulate(sizes[:-1], initial=0))
    link = LinkTimes(5e-6, 1e-6, 1e9, 1e9, 0.0, 0.0)
    return Probe(
        VERSION,
        JobFacts(name, model["batch"], 1_000_000, elements, 4, 3, starts, ready, True, False),
        RankFacts((RANKS_PER_NODE, RANKS_PER_NODE), RANKS_PER_NODE, 0.0),
        compute,
        ServerTimes(update_s, 2 * pass_s),
        {"int8": CodecTimes(0.254, 4 * pass_s, 2 * pass_s)},
        link,
        link,
        None,
        tuple(sigma),
        Noise(0.0, 0),
    )


def scenario(probe: Probe, link: str, nodes: int, options: dict[str, Any]) -> Scenario:
    """Return the scenario of a mode on a number of nodes; if several, modes with servers have one for each node."""
    if options["mode"] in ("async", "backup") and nodes > 1:
        options = {**options, "ps": nodes}
    if nodes == 1:
        options = {name: value for name, value in options.items() if name != "compress"}
    made = scenario_of(probe, RunConfig.of(**options), (RANKS_PER_NODE,) * nodes)
    return dataclasses.replace(made, between=shaped(made.between, parse_rate(link)))


def relative_speed(probe: Probe, made: Scenario) -> float:
    """Return the speed relative to one rank that never waits."""
    return predict(probe, made, steps=50).efficiency * len(made.workers)


def anchors() -> list[SpeedCurve]:
    """Return the published results, and the predictions for the same hardware."""
    curves = []
    for published in (True, False):
        points = []
        for result in HARDWARE["results"]:
            if "published" in result:
                ranks, compute_s = result["nodes"] * result["gpus_per_node"], result["batch"] / result["images_per_s"]
                step_s = simulated_step_s(result, HARDWARE, HARDWARE["assumptions"]["network_hop_s"])
                points.append((ranks, ranks * (result["published"] if published else compute_s / step_s)))
        curves.append(
            SpeedCurve(
                f"Horovod, ChainerMN ({'published' if published else 'predicted'})", tuple(sorted(points)), False
            )
        )
    return curves


def plot(name: str, output: Path) -> None:
    """Write the plot of ``sync`` on all links; the plot of ResNet-50 also has the published results."""
    probe = probe_of(name)
    curves = [
        SpeedCurve(
            f"sync, {link.replace('gbit', ' Gbit/s')}",
            tuple((n * RANKS_PER_NODE, relative_speed(probe, scenario(probe, link, n, MODES["sync"]))) for n in NODES),
        )
        for link in LINKS
    ]
    if name == "ResNet-50":
        curves += anchors()
    path = output / f"{name.lower()}.svg"
    write_scaling(path, f"{name}: predicted speed, 8 ranks per node", curves, 1.0, "speed relative to one rank")
    print(path)


def table(names: Sequence[str], nodes: int) -> None:
    """Print the speed of every mode in percent of ranks that never wait."""
    print(f"\n% of {nodes * RANKS_PER_NODE} ranks that never wait\n")
    print("| model | link | " + " | ".join(MODES) + " |")
    print("| --- " * (len(MODES) + 2) + "|")
    for name in names:
        probe = probe_of(name)
        for link in LINKS:
            speeds = [
                relative_speed(probe, made) / (nodes * RANKS_PER_NODE)
                for made in (scenario(probe, link, nodes, options) for options in MODES.values())
            ]
            best = max(speeds)
            cells = [f"**{100 * speed:.0f}**" if speed > 0.98 * best else f"{100 * speed:.0f}" for speed in speeds]
            print(f"| {name} | {link.replace('gbit', ' Gbit/s')} | " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "scaling")
    parser.add_argument("--nodes", type=int, default=8, help="nodes of the table")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    table([*MODELS], arguments.nodes)
    for name in MODELS:
        plot(name, arguments.output)


if __name__ == "__main__":
    main()
