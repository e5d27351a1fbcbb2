"""Compares the results of runs."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest

from .launch import JOBS
from .world.controller import World

GLOBAL_BATCH = 12
SMALL = JOBS / "small.py"


def final(run_dir: Path) -> dict[str, np.ndarray]:
    """Return every dataset of the run's newest checkpoint."""
    newest = max((run_dir / "checkpoints").glob("step-*.h5"))
    found: dict[str, np.ndarray] = {}
    with h5py.File(newest) as file:
        file.visititems(lambda name, item: found.update({name: item[()]}) if isinstance(item, h5py.Dataset) else None)
    return found


def assert_close(a: dict[str, np.ndarray], b: dict[str, np.ndarray], tolerance: float) -> None:
    assert a.keys() == b.keys()
    for name in a:
        # The error is relative to the largest element: for an element near zero, a relative error has no meaning.
        error, size = np.abs(a[name] - b[name]).max(), np.abs(b[name]).max()
        assert error <= tolerance * size, f"{name} differs by {error:.2g}, and its largest element is {size:.2g}"


def assert_same_bits(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].tobytes() == b[name].tobytes(), f"{name} differs"


def train(world: World, n: int, run_dir: Path, *flags: str, global_batch: int = GLOBAL_BATCH) -> dict[str, np.ndarray]:
    world.train(n, SMALL, "--batch-size", str(global_batch // n), "--run-dir", run_dir, *flags)
    return final(run_dir)


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory, world: World):
    """A function that returns the results of one rank with the global batch, trained once for each set of flags."""
    known: dict[tuple[str, ...], dict[str, np.ndarray]] = {}

    def get(*flags: str) -> dict[str, np.ndarray]:
        if flags not in known:
            known[flags] = train(world, 1, tmp_path_factory.mktemp("alone"), *flags)
        return known[flags]

    return get
