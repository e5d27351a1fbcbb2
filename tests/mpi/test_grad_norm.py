"""``--log-grad-norm``: the norm of the averaged gradient is the same on all ranks, and does not affect training."""

from __future__ import annotations

import json
from pathlib import Path

import h5py
import numpy as np
import pytest

from ..support.results import SMALL, assert_same_bits, final
from ..support.world.controller import World

RATE, CLIP, STEPS = 0.5, 0.25, 6
JOB = f"""
import sys
from pathlib import Path

sys.path.insert(0, {str(SMALL.parent)!r})
from dataclasses import replace

import small
from mpitrain import Hook, Job


class WritesNorms(Hook):
    def after_step(self, loop):
        with open(f"norms-{{loop.cluster.rank}}.txt", "a") as file:
            print(repr(loop._strategy.stats().grad_norm), file=file)


def job(optimizer: str = "sgd", clip_norm: float = 0.0) -> Job:
    made = small.job(learning_rate={RATE}, optimizer=optimizer, clip_norm=clip_norm, normalize=False)
    return replace(made, hooks=[WritesNorms()])
"""


def params(path: Path) -> np.ndarray:
    with h5py.File(path) as file:
        parts: list[np.ndarray] = []
        file["params"].visititems(
            lambda _, item: parts.append(item[()].ravel()) if isinstance(item, h5py.Dataset) else None
        )
        return np.concatenate(parts)


def recorded(run_dir: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["grad_norm"] for line in lines if "grad_norm" in line}


def run(world: World, n: int, folder: Path, job: Path, *flags: str) -> Path:
    run_dir = folder / "run"
    shared = ["--train-steps", str(STEPS), "--batch-size", "4", "--dtype", "float64", "--run-dir", run_dir]
    world.train(n, job, *shared, *flags, cwd=folder, timeout=150)
    return run_dir


@pytest.mark.parametrize(
    ("n", "flags", "clip"),
    [
        (3, [], 0.0),
        (3, ["--bucket-bytes", "0", "--no-shared-memory"], 0.0),
        (2, [], CLIP),
        (2, ["--device", "gpu"], 0.0),
        (1, ["--device", "gpu"], CLIP),
    ],
    ids=str,
)
def test_sgd_moves_by_the_norm(
    n: int, flags: list[str], clip: float, job, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    world: World = request.getfixturevalue("gpu_world" if "gpu" in flags else "world")
    options = ["--save-steps", "1", "--log-grad-norm", "--log-steps", "2", "--clip-norm", str(clip), *flags]
    run_dir = run(world, n, tmp_path, job(JOB), *options)
    norms = recorded(run_dir)
    assert [*norms] == [2, 4, 6]
    for step, norm in norms.items():
        before, after = (params(run_dir / "checkpoints" / f"step-{k:010}.h5") for k in (step - 1, step))
        assert np.linalg.norm(after - before) / RATE == pytest.approx(min(norm, clip or norm), rel=1e-9)
    assert not clip or max(norms.values()) > clip
    by_rank = {(tmp_path / f"norms-{rank}.txt").read_text() for rank in range(n)}
    assert len(by_rank) == 1
    assert [line == "None" for line in by_rank.pop().split()] == [step < 2 for step in range(1, STEPS + 1)]


def test_measuring_changes_no_bit(world: World, job, tmp_path: Path) -> None:
    written = []
    for name, flags in (("off", []), ("on", ["--log-grad-norm", "--log-steps", "2"])):
        (tmp_path / name).mkdir()
        written.append(final(run(world, 2, tmp_path / name, job(JOB), "--optimizer", "adam", *flags)))
    assert_same_bits(*written)


@pytest.mark.parametrize(
    ("flags", "cause"),
    [(["--mode", "async"], "--mode sync"), (["--log-steps", "0"], "--log-steps"), (["--optimizer", "lamb"], "lamb")],
)
def test_what_cannot_be_measured_is_refused(flags: list[str], cause: str, world: World, tmp_path: Path) -> None:
    assert cause in world.refusal(1, SMALL, "--log-grad-norm", "--run-dir", tmp_path / "run", *flags)
