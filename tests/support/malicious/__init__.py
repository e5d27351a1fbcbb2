"""Writes malicious checkpoints with valid digests, and checks that reading them is harmless.

Each checkpoint is read in a forked process with limited memory and time. Reading must not open files that are not part
of a checkpoint, and each error must be one line.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from mpitrain.checkpoint.container import write_container
from mpitrain.checkpoint.state import root_attributes

from ..damage import save
from ..launch import VERSION_0_1
from . import content, descriptions, manifests, shards, structures
from .content import mutate
from .descriptions import mutate_description
from .reading import SECRET, Outcome, check, in_child, read_with_hdf5
from .sealing import manifest_of, seal as seal
from .shards import STEP

RECIPES = {**structures.RECIPES, **manifests.RECIPES, **descriptions.RECIPES, **content.RECIPES, **shards.RECIPES}


def campaign(folder: Path, count: int, seed: int) -> Iterator[tuple[str, Outcome]]:
    """Yield kind and outcome of ``count`` malicious files: first all crafted files, then mutated ones."""
    rng = np.random.default_rng(seed)
    secret = folder / "secret"
    secret.write_bytes(SECRET)
    plain = save(folder / "none", STEP)
    many = save(folder / "many", STEP)
    write_container(many, {f"params/{i}": np.ones(3) for i in range(60)}, {"/": root_attributes(STEP, 1, 0)})
    valid = [plain, save(folder / "gzip", STEP, "gzip"), many, *sorted(VERSION_0_1.rglob("step-??????????.h5"))]
    for index in range(count):
        name = [*RECIPES][index] if index < len(RECIPES) else "mutated"
        inner = folder / f"{index}"
        original = valid[index % len(valid)] if name == "mutated" else plain
        path = shutil.copytree(original.parent, inner) / original.name
        if name == "mutated":
            with_description = index % 2 and manifest_of(path).structure is not None
            (mutate_description if with_description else mutate)(path, rng)
        else:
            RECIPES[name](path, secret)
        outcome = in_child(lambda path=path: check(path, secret))  # type: ignore[misc]
        if outcome.result == "accepted":
            compared = in_child(lambda path=path: read_with_hdf5(path))  # type: ignore[misc]
            outcome = compared if compared.result.startswith("FAILED") else outcome
        yield name, outcome
        if not outcome.result.startswith("FAILED"):
            shutil.rmtree(inner)


def main(count: int, seed: int = 0) -> int:
    """Run a campaign; return 1 if a file does harm or a crafted one is not refused."""
    found: Counter[str] = Counter()
    failed, seconds, peak_bytes = 0, 0.0, 0
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # exports are synced, which is slow on disks
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        for index, (name, (result, *used)) in enumerate(campaign(Path(folder), count, seed)):
            seconds, peak_bytes = max(seconds, used[0]), max(peak_bytes, used[1])
            found[f"{'mutated' if name == 'mutated' else 'crafted'} {result.split()[0]}"] += 1
            if result.startswith("FAILED") or (name != "mutated" and result != "refused"):
                print(f"file {index} of seed {seed}, {name}: {result}")
                failed += 1
    for line, times in sorted(found.items()):
        print(f"{times:6,} {line}")
    print(f"each within {seconds:.2f} s and {peak_bytes >> 20} MiB")
    return int(failed > 0)
