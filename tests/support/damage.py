"""Damages checkpoints, and checks that the damage is detected."""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np

from mpitrain import checkpoint
from mpitrain.checkpoint.container import Compression
from mpitrain.core.extra_state import Versioned
from mpitrain.core.layout import Layout
from mpitrain.errors import DamagedCheckpoint

LAYOUT = Layout.pack(
    [
        ("conv.weight", (3, 3, 2, 5), "param"),
        ("dense.weight", (61, 37), "param"),
        ("dense.bias", (37,), "param"),
        ("norm.mean", (37,), "state"),
    ]
)
NAMES = ("params", "square", "average")


def state(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    made = {}
    for name in NAMES:
        vector = made[name] = np.zeros(LAYOUT.size, np.float32)
        for view in LAYOUT.views(vector).values():
            view[...] = rng.standard_normal(view.shape)
    made["square"][LAYOUT.n_trained :] = 0  # layer state has no slots
    return made


def save(folder: Path, step: int, compression: Compression = "none") -> Path:
    path = checkpoint.path_for(folder, step)
    about = {"mode": "sync", "config": {"batch_size": 12}}
    snapshot = checkpoint.Snapshot(state(step), step, 10 * step, {"loss_scale": Versioned(1, {"scale": step + 0.5})})
    checkpoint.write(path, LAYOUT, snapshot, 0, about, compression)
    return path


def damage(path: Path, other: Path, rng: np.random.Generator) -> str:
    """Damage a file in a randomly selected way; return the kind of damage."""
    content = bytearray(path.read_bytes())
    way = str(rng.choice(["bit", "bits", "byte", "zeros", "cut", "grown", "moved", "twice", "swapped"]))
    # Half of the places are in the first 20,000 bytes: the structure, a small part of the file, is damaged often.
    start = int(rng.integers(len(content) if rng.random() < 0.5 else 20_000))
    length = int(rng.integers(1, 5000))
    if way in ("bit", "bits"):
        for _ in range(1 if way == "bit" else 50):
            at = start if way == "bit" else int(rng.integers(len(content)))
            content[at] ^= 1 << int(rng.integers(8))
    elif way == "byte":
        content[start] = int(rng.integers(256))
    elif way == "zeros":
        content[start : start + length] = bytes(len(content[start : start + length]))
    elif way == "cut":
        del content[start:]
    elif way == "grown":
        content += rng.bytes(length)
    elif way == "moved":
        del content[start : start + length]
        content += bytes(length)
    elif way == "twice":  # a block of the file in the place of another block
        start, at = (int(rng.integers(len(content) - length)) for _ in range(2))
        content[at : at + length] = content[start : start + length]
    else:
        content = bytearray(other.read_bytes())
    path.write_bytes(content)
    return way


def outcome(path: Path, step: int) -> str:
    """Return ``refused`` or ``whole``; fail if a file that is read has wrong values."""
    read = {name: np.zeros(LAYOUT.size, np.float32) for name in NAMES}
    refusals: list[str] = []
    reached = None
    try:
        checkpoint.verify(path)
    except DamagedCheckpoint as error:
        refusals.append(str(error))
    try:
        reached = checkpoint.read(path, LAYOUT, read, 0)
    except DamagedCheckpoint as error:
        refusals.append(str(error))
    assert len(refusals) in (0, 2), f"verify and read do not agree: {refusals}"
    if refusals:
        assert all(str(path) in refusal and "\n" not in refusal for refusal in refusals)
        return "refused"
    assert reached == ((step, 10 * step), {"loss_scale": Versioned(1, {"scale": step + 0.5})})
    for name, vector in state(step).items():
        assert read[name].tobytes() == vector.tobytes(), f"{name} has wrong values"
    return "whole"


def damage_many(folder: Path, count: int, seed: int) -> Counter[str]:
    rng = np.random.default_rng(seed)
    found: Counter[str] = Counter()
    for compression in ("none", "gzip"):
        whole, other = save(folder / compression, 30, compression), save(folder / compression, 20, compression)
        older = save(folder / compression, 10, compression)
        original = folder / f"{compression}.h5"
        shutil.copy(whole, original)
        for _ in range(count // 2):
            shutil.copy(original, whole)
            way = damage(whole, other, rng)
            result = outcome(whole, 30)
            found[f"{way} {result}"] += 1
            assert result == "refused" or whole.read_bytes() == original.read_bytes()
            there = checkpoint.steps(folder / compression).values()
            taken, skipped = checkpoint.first_intact(there, checkpoint.verify)
            assert taken is not None and len(skipped) == (result == "refused")
            assert taken[0] == (other if result == "refused" else whole)
        assert outcome(older, 10) == "whole"
    return found


def main(count: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for line, times in sorted(damage_many(Path(folder), count, seed=count).items()):
            print(f"{times:6,} {line}")
