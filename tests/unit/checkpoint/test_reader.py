"""Damaged checkpoints are refused, or their original content is read. ``bench/damage.py`` damages many more."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpitrain import checkpoint
from mpitrain.errors import DamagedCheckpoint

from ...support.damage import damage_many, save


def test_damage_is_refused(tmp_path: Path) -> None:
    found = damage_many(tmp_path, 120, seed=0)
    assert sum(count for name, count in found.items() if name.endswith("refused")) > 90


def test_every_byte_counts(tmp_path: Path) -> None:
    """One bit in each block of 64 bytes of the file is flipped: in the manifest, the structure, and every array."""
    path = save(tmp_path, 30)
    content = path.read_bytes()
    for at in range(0, len(content), 64):
        damaged = bytearray(content)
        damaged[at + (at // 64) % min(64, len(content) - at)] ^= 1 << (at // 64 % 8)
        path.write_bytes(damaged)
        with pytest.raises(DamagedCheckpoint):
            checkpoint.verify(path)


@pytest.mark.parametrize("length", [0, 1, 22, 50, 77, 78, 4095, 4096, 4097])
def test_a_file_that_ends_early_is_refused(tmp_path: Path, length: int) -> None:
    path = save(tmp_path, 30)
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(DamagedCheckpoint, match=str(path)):
        checkpoint.verify(path)
