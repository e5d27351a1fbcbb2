"""Token ids that float32 does not distinguish: they reach a layer that takes integers, and are refused otherwise."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ..support.launch import JOBS
from ..support.world.controller import World

TOKENS = JOBS / "tokens.py"


def accuracy(run_dir: Path) -> float:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return next(line["validation_accuracy"] for line in reversed(lines) if "validation_accuracy" in line)


@pytest.mark.parametrize("n", [1, 2])
def test_a_layer_that_takes_integers_tells_tokens_apart(world: World, n: int, tmp_path: Path) -> None:
    world.train(n, TOKENS, "--run-dir", tmp_path)
    assert accuracy(tmp_path) == 1


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_integers_reach_a_gpu(gpu_world: World, precision: str, tmp_path: Path) -> None:
    flags = ("--device", "gpu", "--precision", precision, "--run-dir", tmp_path)
    gpu_world.train(2, TOKENS, *flags)
    assert accuracy(tmp_path) == 1


def test_a_conversion_that_rounds_is_refused_before_training(world: World, tmp_path: Path) -> None:
    line = world.refusal(2, TOKENS, "--no-lookup", "--run-dir", tmp_path)
    assert "training" in line and "16777217" in line
    assert not list(tmp_path.glob("checkpoints/*"))
