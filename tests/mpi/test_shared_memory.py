"""Memory shared by the ranks of a node, with each MPI library."""

from __future__ import annotations

import pytest

from ..support.launch import PROGRAMS, Mpi

PROGRAM = PROGRAMS / "shared_memory.py"


@pytest.mark.quick
@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_arrays_board_and_averages(mpi: Mpi, n: int) -> None:
    done = mpi.run(n, PROGRAM)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "ok"
