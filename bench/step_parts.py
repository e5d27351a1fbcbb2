"""The parts of a training step of ``jobs/mnist_mlp.py``, beside the same operations in a program of their own.

    python bench/step_parts.py [--units 100 1024] [--steps 3000] [--data DIR]

For each part of a step, in microseconds, the shortest of all steps (other programs only make steps longer), and the
median:

- ``alone``: NumPy's products and mpitrain's compiled kernels on the same arrays, in the order of a step.
- ``in a step``: spans of ``--trace`` of one rank. Each span adds about 1 us.

The difference is what mpitrain does in Python. Below the table are limits: the products alone, again and again on the
same operands, and a copy of as many bytes as the update reads and writes.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from checkouts import THIS
from environment import one_thread_and_own_kernels, use_this_checkout

one_thread_and_own_kernels()
use_this_checkout()

import numpy as np  # noqa: E402

from mpitrain.core import ops  # noqa: E402
from mpitrain.core.device import CPU  # noqa: E402
from mpitrain.data.permutation import order  # noqa: E402
from mpitrain.optim import adam  # noqa: E402
from mpitrain.optim.compiled import SCRATCH  # noqa: E402

BATCH, INPUTS, CLASSES, EXAMPLES = 100, 784, 10, 60_000
PARTS = ("load", "forward", "backward", "update")
Times = dict[str, list[float]]


def zeros(*shape: int) -> Any:
    array = CPU.empty(shape, np.float32)
    array.fill(0)
    return array


class Alone:
    """The operations of a step."""

    def __init__(self, units: int) -> None:
        generator = np.random.default_rng(0)
        sizes = {"w1": (INPUTS, units), "b1": (units,), "w2": (units, CLASSES), "b2": (CLASSES,)}
        self.size = sum(map(int, map(np.prod, sizes.values())))
        self.params, self.grads, self.mean, self.square = (zeros(self.size) for _ in range(4))
        self.params[:] = generator.normal(size=self.size) / 20
        start = 0
        for name, shape in sizes.items():
            stop = start + int(np.prod(shape))
            setattr(self, name, self.params[start:stop].reshape(shape))
            setattr(self, f"{name}_grad", self.grads[start:stop].reshape(shape))
            start = stop
        self.stored = generator.integers(0, 255, (EXAMPLES, INPUTS), np.uint8)
        self.labels = generator.integers(0, CLASSES, EXAMPLES, np.uint8)
        self.batches = [(zeros(BATCH, INPUTS), np.empty(BATCH, np.uint8)) for _ in range(2)]
        self.hidden, self.hidden_grad = zeros(BATCH, units), zeros(BATCH, units)
        self.outputs, self.outputs_grad = zeros(BATCH, CLASSES), zeros(BATCH, CLASSES)
        self.scratch, self.nothing = zeros(4 * SCRATCH), zeros(0)
        self.bounds, self.one, self.zero = np.array([[0, self.size, 1]]), np.ones(1), np.zeros(1)
        self.steps = 0

    def load(self) -> None:
        self.x, self.y = self.batches[self.steps % 2]
        indices = order(self.steps * BATCH, BATCH, EXAMPLES, 1)
        ops.take(self.stored, indices, 1 / 255, self.x)
        np.take(self.labels, indices, axis=0, out=self.y, mode="clip")
        self.steps += 1

    def forward(self) -> None:
        np.matmul(self.x, self.w1, out=self.hidden)
        ops.add_bias(self.hidden, self.b1, "relu", 0.0, np.empty)
        np.matmul(self.hidden, self.w2, out=self.outputs)
        ops.add_bias(self.outputs, self.b2, "none", 0.0, np.empty)
        ops.softmax_gradient(self.outputs, self.y, 1 / BATCH, self.outputs_grad, None)

    def backward(self) -> None:
        ops.add_bias_backward(None, "none", 0.0, self.outputs_grad, self.b2_grad)
        np.matmul(self.hidden.T, self.outputs_grad, out=self.w2_grad)
        np.matmul(self.outputs_grad, self.w2.T, out=self.hidden_grad)
        ops.add_bias_backward(self.hidden, "relu", 0.0, self.hidden_grad, self.b1_grad)
        np.matmul(self.x.T, self.hidden_grad, out=self.w1_grad)

    def update(self) -> None:
        rule, constants = adam(0.001).compiled(0.001, self.steps)
        row, first = self.grads.reshape(1, -1), np.zeros(1, np.int64)
        groups = constants, self.bounds, self.one, self.zero, self.zero, 0.001, row, first, 0
        rule.update_segments(*groups, self.params, self.mean, self.square, self.nothing, 0.0, self.scratch)

    def products(self) -> None:
        np.matmul(self.x, self.w1, out=self.hidden)
        np.matmul(self.hidden, self.w2, out=self.outputs)
        np.matmul(self.hidden.T, self.outputs_grad, out=self.w2_grad)
        np.matmul(self.outputs_grad, self.w2.T, out=self.hidden_grad)
        np.matmul(self.x.T, self.hidden_grad, out=self.w1_grad)


def timed(calls: dict[str, Callable[[], object]], rounds: int) -> Times:
    """Call the functions in turns; return the microseconds of each call."""
    times: Times = {name: [] for name in calls}
    for _ in range(rounds):
        for name, function in calls.items():
            began = time.perf_counter()
            function()
            times[name].append(1e6 * (time.perf_counter() - began))
    return times


def in_a_step(units: int, steps: int, folder: str) -> Times:
    """Return the microseconds of the spans of each kind, of one rank."""
    with tempfile.TemporaryDirectory() as temporary:
        flags = ["--data-dir", folder, "--hidden-units", str(units), "--train-steps", str(steps), "--threads", "1"]
        flags += ["--validate-steps", "0", "--trace", "--trace-steps", str(steps)]
        THIS.run(
            "-m", "mpitrain", "run", "-n", "1", THIS.folder / "jobs" / "mnist_mlp.py", *flags, "--run-dir", temporary
        )
        events = json.loads(Path(temporary, "trace.json").read_text())["traceEvents"]
    times: Times = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            times[event["name"]].append(event["dur"])
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description="The parts of a training step, beside the same operations alone.")
    parser.add_argument("--units", type=int, nargs="*", default=[100, 1024])
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--data", default="/usr/share/datasets/fashion-mnist")
    given = parser.parse_args()
    for units in given.units:
        own = Alone(units)
        own.load()
        calls = {name: getattr(own, name) for name in PARTS}
        alone, step = timed(calls, given.steps), in_a_step(units, given.steps, given.data)
        print(f"{units} hidden units, us    alone, shortest  median    in a step, shortest  median")
        for name in (*PARTS, "average", "wait", "hooks", "step"):
            left = f"{min(alone[name]):15.1f} {np.median(alone[name]):7.1f}" if name in alone else " " * 23
            print(f"  {name:10} {'':12} {left}    {min(step[name]):19.1f} {np.median(step[name]):7.1f}")
        copied = [np.ones(7 * own.size // 2, np.float32) for _ in range(2)]
        limits = timed({"products": own.products}, given.steps) | timed(
            {"copy": lambda copied=copied: np.copyto(*copied)}, given.steps
        )
        for name, text in (("products", "products"), ("copy", f"copy of {28 * own.size:,} bytes, read and written")):
            print(f"  {text}: {min(limits[name]):.1f}, median {np.median(limits[name]):.1f}")


if __name__ == "__main__":
    main()
