"""Local SGD: runs give the results of a simulation of all workers in NumPy; resumed runs give the same bits.

Fragments and exchanges that overlap with steps are simulated, too; the order of messages is not.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from mpitrain.core.ranges import aligned_range
from mpitrain.data.permutation import order

from ..support.jobs.linear import BATCH, CLASSES, FEATURES, MOMENTUM, RATE, N, examples
from ..support.launch import JOBS, Mpi
from ..support.results import assert_same_bits, final
from ..support.world.controller import World

LINEAR = JOBS / "linear.py"
WEIGHT, BIAS, SIZE = slice(0, 200), slice(208, 218), 224  # ranges of the flat vector, which begin on cache lines


@dataclass(frozen=True)
class How:
    """Options of the mode."""

    outer: str = ""
    fragments: int = 1
    overlap: int = 0
    after: int = 0
    every: int = 8
    compress: str = ""  # between nodes; then each rank counts as a node

    @property
    def flags(self) -> list[str]:
        flags = ["--mode", "local", "--local-steps", self.every, "--local-after", self.after]
        if self.outer:
            flags += ["--outer-optimizer", self.outer, "--outer-learning-rate", "0.6"]
            flags += ["--fragments", self.fragments, "--overlap-steps", self.overlap]
        if self.outer == "nesterov":
            flags += ["--outer-momentum", "0.7"]
        if self.compress:
            flags += ["--compress", self.compress, "--no-shared-memory"]
        return [str(flag) for flag in flags]


def gradient(params: np.ndarray, position: int) -> np.ndarray:
    x, labels = examples()
    batch = order(position, BATCH, N, 0)
    logits = x[batch] @ params[WEIGHT].reshape(FEATURES, CLASSES) + params[BIAS]
    exp = np.exp(logits - logits.max(axis=1, keepdims=True))
    error = (exp / exp.sum(axis=1, keepdims=True) - np.eye(CLASSES)[labels[batch]]) / BATCH
    grads = np.zeros(SIZE)
    grads[WEIGHT], grads[BIAS] = (x[batch].T @ error).ravel(), error.sum(axis=0)
    return grads


class Simulation:
    """Simulates all workers in one process."""

    def __init__(self, how: How, n: int, initial: np.ndarray) -> None:
        self.how, self.n = how, n
        self.params, self.velocity = np.tile(initial, (n, 1)), np.zeros((n, SIZE))
        self.center, self.outer_velocity = initial.copy(), np.zeros(SIZE)
        self.pending: tuple[slice, np.ndarray] | None = None  # a fragment, and the parameters that the workers sent

    def train(self, steps: int) -> np.ndarray:
        """Train for ``steps`` steps; return the parameters of the trained model."""
        for step in range(1, steps + 1):
            grads = np.array(
                [gradient(self.params[rank], ((step - 1) * self.n + rank) * BATCH) for rank in range(self.n)]
            )
            if step <= self.how.after:
                grads[:] = grads.mean(axis=0)
            self.velocity = MOMENTUM * self.velocity + grads
            self.params -= RATE * self.velocity
            if step == self.how.after:
                self.center = self.params[0].copy()
            elif step > self.how.after:
                self.agree(step, step == steps)
        return self.center if self.how.outer and steps > self.how.after else self.params[0]

    def agree(self, step: int, last: bool) -> None:
        how, at = self.how, (step - 1) % self.how.every + 1
        if not how.outer:
            if at == how.every or last:
                self.params[:], self.velocity[:] = self.params.mean(axis=0), self.velocity.mean(axis=0)
            return
        for index in range(how.fragments):
            merges = (index + 1) * how.every // how.fragments
            part = slice(*aligned_range(0, SIZE, index, how.fragments))
            if at == merges - how.overlap:
                self.pending = part, self.params[:, part].copy()
            if at == merges or last:
                self.merge()
            if last and at != merges:
                self.center[part] = self.params[:, part].mean(axis=0)

    def merge(self) -> None:
        if self.pending is None:
            return
        (part, sent), self.pending = self.pending, None
        outer_gradient = (self.center[part] - sent).mean(axis=0)
        if self.how.outer == "nesterov":
            self.outer_velocity[part] = 0.7 * self.outer_velocity[part] + outer_gradient
            outer_gradient = outer_gradient + 0.7 * self.outer_velocity[part]
        self.center[part] -= 0.6 * outer_gradient
        self.params[:, part] = self.center[part] + (self.params[:, part] - sent)


def flat(run_dir: Path) -> np.ndarray:
    stored, vector = final(run_dir), np.zeros(SIZE)
    vector[WEIGHT] = stored["params/dense1.weight"].ravel()
    vector[BIAS] = stored["params/dense1.bias"]
    return vector


WAYS = [
    (3, How()),
    (3, How("sgd", every=3)),
    (1, How("nesterov")),
    (3, How("nesterov")),
    (3, How("nesterov", fragments=3)),
    (3, How("nesterov", fragments=2, overlap=3)),
    (2, How("nesterov", overlap=7, after=9)),
    (2, How(after=5)),
    (2, How("sgd", after=40)),
]


@pytest.fixture(scope="module")
def initial(world: World, tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    folder = tmp_path_factory.mktemp("initial")
    world.train(1, LINEAR, "--dtype", "float64", "--train-steps", "0", "--run-dir", folder, timeout=150)
    return flat(folder)


@pytest.mark.parametrize(("n", "how"), WAYS, ids=str)
def test_it_is_what_a_simulation_computes(world: World, n: int, how: How, initial: np.ndarray, tmp_path: Path) -> None:
    # 37 steps end within a cycle. With three fragments, each rank counts as a node.
    flags = [*how.flags, "--dtype", "float64", "--train-steps", "37", *["--no-shared-memory"] * (how.fragments > 2)]
    world.train(n, LINEAR, *flags, "--run-dir", tmp_path)
    expected, trained = Simulation(how, n, initial).train(37), flat(tmp_path)
    assert np.abs(trained - initial).max() > 0.01
    assert np.abs(trained - expected).max() <= 1e-12 * np.abs(expected).max()


@pytest.mark.parametrize(("compress", "tolerance"), [("bfloat16", 0.001), ("int8", 0.005), ("int4", 0.1)])
def test_compressed_outer_gradients_are_nearly_the_same(
    world: World, compress: str, tolerance: float, initial: np.ndarray, tmp_path: Path
) -> None:
    how = How("nesterov", fragments=2, compress=compress)
    world.train(3, LINEAR, *how.flags, "--dtype", "float64", "--train-steps", "40", "--run-dir", tmp_path)
    expected = Simulation(how, 3, initial).train(40)
    error = np.linalg.norm(flat(tmp_path) - expected) / np.linalg.norm(expected)
    assert 1e-6 < error < tolerance


@pytest.mark.parametrize(
    ("how", "name"),
    [
        (How("nesterov"), "SIGKILL"),
        (How("nesterov", fragments=2, overlap=3), "SIGKILL"),
        (How("sgd", fragments=3), "SIGTERM"),
        (How("nesterov", fragments=2, overlap=3, compress="int4"), "SIGTERM"),
        (How("nesterov", after=16), "SIGTERM"),
    ],
    ids=str,
)
def test_a_resumed_run_is_the_same_bits(openmpi: Mpi, world: World, how: How, name: str, tmp_path: Path) -> None:
    flags = (*how.flags, "--save-steps", "8", "--no-save-background", "--run-dir")
    world.train(2, LINEAR, *flags, tmp_path / "whole")
    words = [LINEAR, *flags, tmp_path / "parts", "--signal-name", name, "--at-step", "27", "--mark", tmp_path / "mark"]
    first = openmpi.run(2, "-m", "mpitrain", "train", *words)
    assert first.returncode != 0 and (tmp_path / "mark").exists(), first.stdout + first.stderr
    assert "resumed from" in world.train(2, *words).stdout
    assert_same_bits(final(tmp_path / "parts"), final(tmp_path / "whole"))


def test_another_number_of_workers_continues_from_the_global_parameters(world: World, tmp_path: Path) -> None:
    flags = (*How("nesterov", fragments=2, overlap=3).flags, "--run-dir", tmp_path)
    world.train(2, LINEAR, *flags, "--train-steps", "16")
    before = final(tmp_path)
    world.train(3, LINEAR, *flags, "--train-steps", "17", "--outer-learning-rate", "1e-9", "--local-steps", "99")
    stored = final(tmp_path)
    workers = {name.split("/")[2] for name in stored if name.startswith("run/state/local")}
    assert workers == {f"local, worker {rank} of 3" for rank in range(3)}
    velocity = "run/state/outer optimizer/velocity"
    assert np.abs(before[velocity]).max() > 0 and stored[velocity].tobytes() == before[velocity].tobytes()
