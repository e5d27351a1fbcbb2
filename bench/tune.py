"""The choice of ``mpitrain tune`` against exhaustive runs of all configurations that it could have chosen.

    python bench/tune.py [--settings 0 1 2 3 4 5] [--seconds 3] [--rounds 2]

A setting is a model, ranks on hosts, a rate of the hosts' links, and the options that may change. Hosts are network
namespaces (root, iproute2). First ``tune`` chooses a configuration. Then every configuration that it has predicted runs
for some seconds, in some rounds. The score of a configuration is the measured examples/s times ``worth``, the value of
an example that ``tune`` assumes. The choice is compared with the configuration of the best score.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from environment import one_thread_and_own_kernels, use_this_checkout
from predict import JOBS, Hosts

REPORTS = 8
SETTINGS = [
    ("mlp", (2,), "none", "mode,batch"),
    ("mlp", (1, 1), "1gbit", "compression"),
    ("mlp", (1, 1), "100mbit", "mode,compression,local-steps"),
    ("accelerator", (2,), "none", "mode"),
    ("accelerator", (1, 1), "1gbit", "mode,compression"),
    ("accelerator", (2, 1), "300mbit", "mode,compression,staleness"),
]


def tuned(hosts: Hosts, model: str, ranks: tuple[int, ...], changes: str) -> tuple[dict[str, Any], float]:
    """Return the result of ``mpitrain tune``, and the seconds that it took."""
    with tempfile.TemporaryDirectory() as folder:
        output, began = Path(folder, "tune.json"), time.monotonic()
        hosts.run("tune", list(ranks), ["--may-change", changes, "-o", str(output), *JOBS[model]])
        return json.loads(output.read_text()), time.monotonic() - began


def examples_per_s(
    hosts: Hosts, model: str, ranks: tuple[int, ...], options: dict[str, Any], expected: float, seconds: float
) -> float:
    """Return the measured examples/s; 0 if the run fails."""
    batch = options.get("batch_size", 100 if model == "mlp" else 8)
    every = REPORTS * (options.get("local_steps", 8) if options.get("mode") == "local" else 1)
    steps = max(2, round(expected / batch * seconds / every)) * every
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    with tempfile.TemporaryDirectory() as folder:
        words = [*flags, "--log-steps", str(steps // REPORTS), "--train-steps", str(steps), "--validate-steps", "0"]
        words += ["--no-tensorboard", "--run-dir", f"{folder}/run", *JOBS[model]]
        try:
            hosts.run("run", list(ranks), words)
        except SystemExit:
            return 0.0
        lines = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
    return statistics.median([line["examples_per_s"] for line in lines if "examples_per_s" in line][1:])


def compare(model: str, ranks: tuple[int, ...], rate: str, changes: str, seconds: float, rounds: int) -> float:
    """Run one setting; return the score of the choice relative to the best."""
    from tests.support.hosts.network import make_hosts

    with make_hosts(Path(sys.executable), max(2, len(ranks)), "" if rate == "none" else rate) as network:
        hosts = Hosts(network, seconds)
        result, took = hosts.undisturbed(lambda: tuned(hosts, model, ranks, changes))
        scores = []
        for one in result["configurations"]:
            measure = functools.partial(
                examples_per_s, hosts, model, ranks, one["options"], one["predicted_examples_per_s"], seconds
            )
            rates = [hosts.undisturbed(measure) for _ in range(rounds)]
            scores.append((statistics.median(rates) * one["worth"], one["options"]))
    best = max(scores, key=lambda score: score[0])
    chosen = next(score for score, options in scores if options == result["use"])
    print(
        f"{model} {'+'.join(map(str, ranks))} {rate}, may change {changes}: {len(scores)} configurations, {took:.0f} s"
    )
    print(f"  chosen {result['use'] or 'as given'}: {chosen:,.0f}; best {best[1] or 'as given'}: {best[0]:,.0f}")
    print(f"  {chosen / best[0]:.1%} of the best", flush=True)
    return chosen / best[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--settings", type=int, nargs="+", default=[*range(len(SETTINGS))])
    parser.add_argument("--seconds", type=float, default=3.0, help="approximate duration of each run")
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    one_thread_and_own_kernels()
    use_this_checkout()
    print(f"load before: {os.getloadavg()[0]:.2f}", flush=True)
    shares = [
        compare(*SETTINGS[index], seconds=arguments.seconds, rounds=arguments.rounds) for index in arguments.settings
    ]
    print(f"worst: {min(shares):.1%} of the best; load afterwards: {os.getloadavg()[0]:.2f}")


if __name__ == "__main__":
    main()
