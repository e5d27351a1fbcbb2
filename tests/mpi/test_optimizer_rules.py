"""Optimizer rules that a job file defines: they train, save and resume like the package's own."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from mpitrain import checkpoint

from ..support.results import assert_close, assert_same_bits, final
from ..support.world.controller import World

RULES = '''
from dataclasses import dataclass
import numpy as np
from mpitrain import Job, data, nn, optim


@dataclass(frozen=True)
class lion(optim.Optimizer):
    """Chen et al., Symbolic Discovery of Optimization Algorithms, 2023, program 1."""

    beta1: float = 0.9
    beta2: float = 0.99

    slots = ("mean",)

    def update(self, params, grads, slots, rate, step):
        mean = slots["mean"]
        params -= rate * np.sign(self.beta1 * mean + (1 - self.beta1) * grads)
        mean *= self.beta2
        mean += (1 - self.beta2) * grads


@dataclass(frozen=True)
class amsgrad(optim.Optimizer):
    """Reddi, Kale and Kumar, On the Convergence of Adam and Beyond, 2018, algorithm 2."""

    slots = ("mean", "square", "largest")

    def update(self, params, grads, slots, rate, step):
        slots["mean"] += 0.1 * (grads - slots["mean"])
        slots["square"] += 0.01 * (grads * grads - slots["square"])
        np.maximum(slots["largest"], slots["square"], out=slots["largest"])
        params -= rate * slots["mean"] / (np.sqrt(slots["largest"]) + 1e-8)


@dataclass(frozen=True)
class heavy_ball(optim.Optimizer):
    slots = ("velocity",)

    def update(self, params, grads, slots, rate, step):
        slots["velocity"] *= 0.9
        slots["velocity"] += grads
        params -= rate * slots["velocity"]


def job(rule: str = "lion", rate: float = 0.005, clip_norm: float = 1.0, weight_decay: float = 0.1) -> Job:
    digits = data.mnist(None)
    made = {**globals(), **vars(optim)}[rule](rate, clip_norm=clip_norm or None, weight_decay=weight_decay)
    layers = nn.Dense(digits.features, 24), nn.ReLU(), nn.Dropout(0.2), nn.Dense(24, 10)
    return Job(nn.Sequential(*layers), nn.SoftmaxCrossEntropy(), made, digits.train, digits.validation,
               batch_size=12, train_steps=40, moving_average=optim.moving_average(0.9))
'''
assert len(RULES.splitlines()) <= 60  # maximum length of rules that users should have to write


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    path = tmp_path / "rules.py"
    path.write_text(RULES)
    return path


def train(world: World, n: int, rules: Path, run_dir: Path, *flags: str, env: dict[str, str] | None = None):
    world.train(n, rules, "--validate-steps", "20", *flags, "--run-dir", run_dir, env=env)
    return final(run_dir)


def accuracy(run_dir: Path) -> float:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line["validation_accuracy"] for line in lines if "validation_accuracy" in line][-1]


@pytest.mark.parametrize("mode", [pytest.param("sync", marks=pytest.mark.quick), "async", "ssp", "backup", "local"])
def test_a_rule_trains(world: World, rules: Path, mode: str, tmp_path: Path) -> None:
    found = train(world, 2, rules, tmp_path / "run", "--mode", mode, "--train-steps", "80")
    assert accuracy(tmp_path / "run") > 0.6
    assert np.abs(found["optimizer/mean/dense1.weight"]).max() > 0 and "averages/dense1.weight" in found


@pytest.mark.parametrize(
    ("rule", "n", "flags"),
    [("lion", 2, ()), ("amsgrad", 1, ("--mode", "async")), ("amsgrad", 2, ("--mode", "async", "--ps", "1"))],
    ids=str,
)
def test_a_run_resumes_to_the_same_bits(
    world: World, rules: Path, rule: str, n: int, flags: tuple[str, ...], tmp_path: Path
) -> None:
    flags = ("--rule", rule, *flags)
    whole = train(world, n, rules, tmp_path / "whole", *flags)
    for steps in ("17", "40"):
        parts = train(world, n, rules, tmp_path / "parts", *flags, "--train-steps", steps)
    assert_same_bits(parts, whole)


def test_the_result_does_not_depend_on_who_updates_what(world: World, rules: Path, tmp_path: Path) -> None:
    """Two ranks, which update different elements, compared with one rank with the global batch."""
    flags = ("--rule", "amsgrad", "--dtype", "float64")
    alone = train(world, 1, rules, tmp_path / "alone", *flags, "--batch-size", "12")
    for name, more in {"cut": ("--bucket-bytes", "100"), "messages": ("--no-shared-memory",)}.items():
        assert_close(train(world, 2, rules, tmp_path / name, *flags, "--batch-size", "6", *more), alone, 1e-9)


@pytest.mark.parametrize("clip_norm", ["0", "0.5"])
def test_clipping_and_decay_are_those_of_the_package(world: World, rules: Path, clip_norm: str, tmp_path: Path) -> None:
    """``heavy_ball`` has the formula of the package's momentum, whose kernel also clips and decays."""
    flags = ("--clip-norm", clip_norm, "--weight-decay", "0.2", "--rate", "0.05", "--dtype", "float64")
    custom, builtin = (
        train(world, 2, rules, tmp_path / rule, "--rule", rule, *flags) for rule in ("heavy_ball", "momentum")
    )
    assert_close(custom, builtin, 1e-12)


@pytest.mark.parametrize("instead", ["return params - rate", "params = params - rate"])
def test_a_bad_rule_is_reported_in_one_line(world: World, rules: Path, instead: str, tmp_path: Path) -> None:
    rules.write_text(RULES.replace("        params -= rate * np.sign", f"        {instead} * np.sign"))
    assert "lion.update" in world.refusal(2, rules, "--run-dir", tmp_path / "run")


@pytest.mark.parametrize(("rule", "clip_norm"), [("amsgrad", "0"), ("amsgrad", "0.5"), ("heavy_ball", "0.5")])
def test_gpus_agree_with_processors(gpu_world: World, rules: Path, rule: str, clip_norm: str, tmp_path: Path) -> None:
    flags = ("--rule", rule, "--clip-norm", clip_norm, "--dtype", "float64", "--batch-size", "6", "--train-steps", "20")
    there = train(gpu_world, 2, rules, tmp_path / "gpu", *flags, "--device", "gpu")
    assert_close(there, train(gpu_world, 2, rules, tmp_path / "cpu", *flags, "--device", "cpu"), 1e-9)


def test_steps_that_overflow_are_skipped_on_a_gpu(gpu_world: World, rules: Path, tmp_path: Path) -> None:
    flags = ("--precision", "float16", "--rate", "8", "--clip-norm", "0", "--weight-decay", "0", "--train-steps", "20")
    found, scales = {}, {}
    for rule in ("heavy_ball", "momentum"):
        found[rule] = train(gpu_world, 1, rules, tmp_path / rule, "--rule", rule, *flags)
        with checkpoint.Checkpoint(checkpoint.path_for(tmp_path / rule / "checkpoints", 20)) as opened:
            scales[rule] = opened.attributes["run/state/loss_scale"]["scale"]
    assert scales["heavy_ball"] == scales["momentum"] < 65536, "no step was skipped"
    assert_close(found["heavy_ball"], found["momentum"], 1e-4)
