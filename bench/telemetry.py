"""The cost of a run's records: steps with and without a trace and TensorBoard events, on one rank.

    python bench/telemetry.py [--rounds 12] [--steps 10000] [--log-steps 100] [--before PATH]

A result is the CPU time per step of the training process, without the first tenth of the steps. Other programs affect
CPU time less than wall-clock time. Variants alternate. The table shows the median over rounds, and its ratio to a run
without records. ``--before`` is a checkout of an older version without records, to compare with a run that writes none.
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

ROOT = Path(__file__).parent.parent
JOB = """
import json, time
from pathlib import Path
from mpitrain import Hook, Job, data, nn, optim

class CpuTime(Hook):
    def after_step(self, loop):
        if loop.step in ({first}, {last}):
            with open({out!r}, "a") as file:
                file.write(json.dumps([loop.step, time.process_time()]) + chr(10))

def job() -> Job:
    digits = data.mnist(None)
    return Job(
        model=nn.Sequential(nn.Dense(digits.features, 100), nn.ReLU(), nn.Dense(100, 10)),
        loss=nn.SoftmaxCrossEntropy(), optimizer=optim.adam(0.001), train=digits.train, batch_size=100,
        train_steps={last}, hooks=[CpuTime()],
    )
"""


def step_us(checkout: Path, steps: int, log_steps: int, flags: list[str]) -> float:
    """Return microseconds of CPU time per step, for a run of the package in ``checkout``."""
    with tempfile.TemporaryDirectory() as folder:
        job, out = Path(folder) / "job.py", Path(folder) / "times"
        job.write_text(JOB.format(first=steps // 10, last=steps, out=str(out)))
        words = [sys.executable, "-m", "mpitrain", "train", str(job), "--run-dir", str(Path(folder) / "run")]
        words += ["--threads", "1", "--log-steps", str(log_steps), "--validate-steps", "0", *flags]
        environment = {**os.environ, "PYTHONPATH": str(checkout)}
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL, env=environment, cwd=checkout)
        (first, began), (last, ended) = (json.loads(line) for line in out.read_text().splitlines())
    return 1e6 * (ended - began) / (last - first)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--log-steps", type=int, default=100)
    parser.add_argument("--before", type=Path)
    arguments = parser.parse_args()
    variants = {
        "no records": (ROOT, ["--no-tensorboard"]),
        "tensorboard": (ROOT, ["--tensorboard"]),
        "trace": (ROOT, ["--no-tensorboard", "--trace"]),
    }
    if arguments.before:
        variants["before"] = (arguments.before.resolve(), [])
    figures: dict[str, list[float]] = defaultdict(list)
    for turn in range(arguments.rounds):
        order = list(variants) if turn % 2 else list(reversed(variants))
        for name in order:
            checkout, flags = variants[name]
            figures[name].append(step_us(checkout, arguments.steps, arguments.log_steps, flags))
    plain = statistics.median(figures["no records"])
    print(f"{'':12} {'us/step':>9}  {'ratio':>6}  {'lowest':>7}  {'highest':>7}")
    for name, values in figures.items():
        median = statistics.median(values)
        print(f"{name:12} {median:9.1f}  {median / plain:6.3f}  {min(values):7.1f}  {max(values):7.1f}")
    per_line = (statistics.median(figures["tensorboard"]) - plain) * arguments.log_steps
    per_step = statistics.median(figures["trace"]) - plain
    print(f"TensorBoard events: {per_line:.0f} us per log line; trace: {per_step:.1f} us per step")


if __name__ == "__main__":
    main()
