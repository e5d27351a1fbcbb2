"""Token ids that float32 does not distinguish: they reach a layer that takes integers, and are refused otherwise."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ..support.launch import JOBS, Mpi, one_line

TOKENS = JOBS / "tokens.py"


def accuracy(run_dir: Path) -> float:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return next(line["validation_accuracy"] for line in reversed(lines) if "validation_accuracy" in line)


@pytest.mark.parametrize("n", [1, 2])
def test_a_layer_that_takes_integers_tells_tokens_apart(openmpi: Mpi, n: int, tmp_path: Path) -> None:
    openmpi.train(n, TOKENS, "--run-dir", tmp_path)
    assert accuracy(tmp_path) == 1


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_integers_reach_a_gpu(openmpi: Mpi, simulated: dict[str, str], precision: str, tmp_path: Path) -> None:
    flags = ("--device", "gpu", "--precision", precision, "--run-dir", tmp_path)
    openmpi.train(2, TOKENS, *flags, env=simulated)
    assert accuracy(tmp_path) == 1


def test_a_conversion_that_rounds_is_refused_before_training(openmpi: Mpi, tmp_path: Path) -> None:
    done = openmpi.run(2, "-m", "mpitrain", "train", TOKENS, "--no-lookup", "--run-dir", tmp_path)
    line = one_line(done.stderr)
    assert done.returncode == 2
    assert "training" in line and "16777217" in line
    assert not list(tmp_path.glob("checkpoints/*"))
