"""Run directories for tests, written without training."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

from mpitrain.monitor.trace import KINDS, Offset, RankTrace, Track, write

NO_OFFSET = (Offset(0, 0, 0), Offset(1, 0, 0))


def make_run(
    folder: Path,
    mode: str = "sync",
    steps: int = 1000,
    every: int = 20,
    seed: int = 0,
    traced: bool = True,
    ranks: int = 2,
    **options: Any,
) -> Path:
    """Make a run directory with all measurements of a mode."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    config = {
        "run": {"mode": mode, "train_steps": steps, "batch_size": 100, **options},
        "job": {"hidden_units": 100},
        "versions": {"job_file": "mnist_mlp", "python": "3.11"},
    }
    (folder / "config.toml").write_bytes(tomli_w.dumps(config).encode())
    lines: list[dict[str, Any]] = []
    for step in range(every, steps + 1, every):
        fall = float(np.exp(-step / (0.2 * steps)))
        line = {
            "step": step,
            "time_s": step * 1e-3,
            "loss": 2.3 * fall + 0.05 + 0.03 * float(rng.random()),
            "learning_rate": 0.01 * (1 - step / steps),
            "examples_per_s": 3e5 + 2e4 * float(rng.random()),
            "step_s": 1e-3,
        }
        if mode != "sync":
            line |= {"staleness_mean": 1 + float(rng.random()), "staleness_max": 4, "dropped": 0}
        lines.append(line)
        if step % (5 * every) == 0:
            measured = {"validation_loss": 2.3 * fall + 0.1, "validation_accuracy": 0.95 - 0.8 * fall}
            lines.append({"step": step, "time_s": step * 1e-3, **measured})
    if mode != "sync":
        workers = [
            {"worker": i, "steps": steps // ranks, "examples_per_s": 1e5 * (1 + i / 5), "staleness_mean": 1 + i / 10}
            for i in range(ranks)
        ]
        lines.append({"step": steps, "time_s": steps * 1e-3, "workers": workers, "staleness_histogram": [9, 60, 25, 5]})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if traced:
        traces = [RankTrace.of(i, f"worker {i}", "node1", [_track(rng, mode, i)], NO_OFFSET) for i in range(ranks)]
        write(folder / "trace.json", traces, same_steps=mode == "sync")
    return folder


class Clock:
    """A clock in nanoseconds that advances only when it is set."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now


@contextmanager
def spanning(track: Track, kind: str) -> Iterator[None]:
    """Record the block as a span of ``track``."""
    track.begin(KINDS.index(kind))
    yield
    track.end()


def _track(rng: np.random.Generator, mode: str, rank: int) -> Track:
    clock = Clock()
    track = Track("training", 50, clock)
    kinds = ["load", "forward", "backward", *(["average", "update", "wait"] if mode == "sync" else ["push", "pull"])]
    for _ in range(60):
        with spanning(track, "step"):
            for kind in kinds:
                with spanning(track, kind):
                    clock.now += int(100_000 * (0.2 + rng.random()) * (1.5 if kind == "wait" and rank == 0 else 1))
            clock.now += 20_000
        clock.now += 5_000
    return track
