"""A file that several nodes write. Saving it is tested with ranks, in ``tests/mpi/test_checkpoints.py``."""

from __future__ import annotations

from mpitrain.checkpoint.shared_file import mpi_libraries


def test_a_process_with_two_mpi_libraries() -> None:
    """HDF5 would receive communicators of another MPI library."""
    line = "7fa8f2a00000-7fa8f2c20000 r-xp 00000000 08:01 12 {}"
    names = ["/usr/lib/libmpi.so.40.30.4", "/home/me/my env/lib/libmpi.so.40", "/usr/lib/libmpi_mpifh.so.40", "[heap]"]
    maps = "\n".join([*(line.format("      " + name) for name in [*names, names[0]]), line.format("")])
    assert mpi_libraries(maps) == set(names[:2])
