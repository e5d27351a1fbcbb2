"""Run on every rank: arrays that a node shares, phases of ``PhaseBarrier``, and averages. Prints ``ok`` on rank 0."""

from __future__ import annotations

import os

import numpy as np

from mpitrain.comm.allreduce import MeanAllreduce
from mpitrain.comm.hierarchy import Hierarchy
from mpitrain.comm.mpi import start
from mpitrain.comm.phase_barrier import PhaseBarrier
from mpitrain.comm.shared_memory import SharedArrays, sharing_problem

comm = start()
rank, size = comm.rank, comm.size
cores = len(os.sched_getaffinity(0))


def check_arrays() -> None:
    shared = SharedArrays(comm)
    for shape, dtype in (((), np.float64), ((1,), np.uint8), ((3, 1000), np.float32), ((0, 4), np.int64)):
        array = shared.allocate(shape, dtype)
        assert array.shape == shape
        assert array.dtype == dtype
        assert array.ctypes.data % 4096 == 0 or not array.size
        assert not array.any()
    rows = shared.allocate((size, 1000), np.float32)
    rows[rank] = rank + 1
    comm.Barrier()
    assert (rows == np.arange(1, size + 1, dtype=np.float32)[:, np.newaxis]).all()
    comm.Barrier()
    shared.free()


def check_refusal() -> None:
    assert sharing_problem(comm, 1000) == ""
    if size > 1:
        assert "bytes of shared memory" in sharing_problem(comm, 1 << 60)


def check_board() -> None:
    """Writes before a rank publishes are visible after the wait; no rank is a phase ahead."""
    shared = SharedArrays(comm)
    barrier = PhaseBarrier(shared, cores)
    values = shared.allocate((size, 512), np.int64)
    for turn in range(1, 1001):
        values[rank] = turn
        barrier.set_status(turn + rank, 1 << rank if turn % 7 == 0 else 0)
        barrier.publish(2 * turn - 1)
        barrier.wait(2 * turn - 1)
        assert barrier.reached(2 * turn - 1)
        assert (values == turn).all()
        assert list(barrier.losses) == [turn + r for r in range(size)]
        assert barrier.flags == [1 << other if turn % 7 == 0 else 0 for other in range(size)]
        barrier.publish(2 * turn)
        barrier.wait(2 * turn)
    assert not barrier.reached(2001)
    comm.Barrier()
    shared.free()


def check_average(count: int, dtype: type) -> None:
    hierarchy = Hierarchy(comm, comm, cores)
    average = MeanAllreduce(hierarchy, count, dtype)
    for turn in range(3):
        vectors = [np.random.default_rng([turn, r]).standard_normal(count).astype(dtype) for r in range(size)]
        average.own[:] = vectors[rank]
        total = vectors[0].copy()
        for vector in vectors[1:]:
            total += vector
        expected = dtype(1.0 / size) * total
        assert average.reduce().tobytes() == expected.tobytes()
        comm.Barrier()  # all ranks have compared before any rank starts the next round
    average.free()
    hierarchy.free()


check_arrays()
check_refusal()
check_board()
for count in (1, 15, 4096, 100_003):
    for dtype in (np.float32, np.float64):
        check_average(count, dtype)
if rank == 0:
    print("ok")
