"""A short form of ``bench/signals.py``."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..support.launch import Mpi
from ..support.signals import MODES, Sender


@pytest.mark.parametrize("mode", MODES)
def test_a_run_ends_soon_after_a_signal(openmpi: Mpi, mode: str, tmp_path: Path) -> None:
    Sender(openmpi, mode, tmp_path / "run", seed=1).send(2)
