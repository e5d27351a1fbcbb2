"""Run on every rank: sums over nodes with each compression. Arguments: the node of each rank. Prints ``ok`` on rank 0.

Checks that results are the same bits on every node, and that received values plus remaining errors equal the sent
values. Compares PowerSGD with its textbook form.
"""

from __future__ import annotations

import os
import sys
import threading

import numpy as np

from mpitrain.comm.background_sums import in_background
from mpitrain.comm.compression import make_codec
from mpitrain.comm.hierarchy import Hierarchy
from mpitrain.comm.internode import CompressedSums, DividedSums, NodeSums
from mpitrain.comm.mpi import start
from mpitrain.comm.powersgd import PowerSums
from mpitrain.comm.sum_order import sum_order
from mpitrain.comm.vector_codec import VectorCodec
from mpitrain.core.kernels import sum_in_place
from mpitrain.core.layout import Layout
from mpitrain.core.ranges import Bucket, buckets_of
from mpitrain.plan.compression import parse_compression

comm = start()
nodes = [int(word) for word in sys.argv[1:]]
cores = len(os.sched_getaffinity(0))
SHAPES = {"a": (70, 90), "bias": (90,), "kernel": (3, 3, 16, 24), "wide": (2, 500), "b": (90, 33)}
LAYOUT = Layout.pack([*((name, shape, "param") for name, shape in SHAPES.items()), ("mean", (17,), "state")])
BUCKETS = buckets_of([entry.start for entry in LAYOUT.entries], LAYOUT.size, 4000)
STEPS = 5


def grads_of(step: int, rank: int) -> np.ndarray:
    """Return the gradient of a rank in a step, with zeros in the gaps between parameters."""
    rng, grads = np.random.default_rng([step, rank]), np.zeros(LAYOUT.size, np.float32)
    for view in LAYOUT.views(grads).values():
        view[...] = rng.standard_normal(view.shape) * 10.0 ** rng.integers(-5, 1)
    return grads


def total_of(step: int) -> np.ndarray:
    return np.sum([grads_of(step, rank).astype(np.float64) for rank in range(comm.size)], axis=0)


def sums_of(text: str, hierarchy: Hierarchy, rows: np.ndarray) -> NodeSums:
    grads = rows[hierarchy.node.rank]
    compression = parse_compression(text) if text else None
    if compression is None:
        returned = hierarchy.shared.allocate((LAYOUT.size,), np.float32)
        return DividedSums(hierarchy, BUCKETS, rows, sum_order(hierarchy, None), returned)
    if compression.rank:
        return PowerSums(hierarchy, BUCKETS, LAYOUT, grads, compression.rank, seed=3)
    codec = VectorCodec(make_codec(compression, grads.dtype), LAYOUT.gaps())
    return CompressedSums(hierarchy, BUCKETS, grads, codec)


def step_of(sums: NodeSums, hierarchy: Hierarchy, rows: np.ndarray, result: np.ndarray, step: int) -> None:
    """Set the ranges of ``result`` that this rank owns to the sum over all ranks; the node shares ``result``."""
    node, own = hierarchy.node, rows[hierarchy.node.rank]
    own[: LAYOUT.size] = grads_of(step, comm.rank)
    node.Barrier()
    for index in range(len(BUCKETS)):
        for lo, hi in sums.parts[index]:
            sum_in_place(rows, np.arange(len(rows)), lo, hi, 1.0, node.rank)
        sums.start(index)
        sums.progress()
    for index in range(len(BUCKETS)):
        sums.finish(index)
        for lo, hi in sums.owned[index]:
            result[lo:hi] = own[lo:hi]
        sums.share(index)
    for index in range(len(BUCKETS)):
        sums.complete(index)
    sums.end_step()
    node.Barrier()


def check(text: str, tolerance: float, in_thread: bool) -> None:
    node = comm.Split(nodes[comm.rank], comm.rank)
    hierarchy = Hierarchy(comm, node, node.size if in_thread else cores)
    rows = hierarchy.shared.allocate((node.size, LAYOUT.size), np.float32)
    result = hierarchy.shared.allocate((LAYOUT.size,), np.float32)
    sums = in_background(sums_of(text, hierarchy, rows), hierarchy, 1 << 30 if in_thread else 0)
    has_thread = in_thread and "powersgd" not in text
    assert sum(thread.name == "mpitrain-progress" for thread in threading.enumerate()) == has_thread
    received = np.zeros(LAYOUT.size)
    for step in range(STEPS):
        step_of(sums, hierarchy, rows, result, step)
        if not sums.is_replicated:
            for bucket in BUCKETS:
                hierarchy.allgather(result, *bucket)
            node.Barrier()
        of_ranks = comm.allgather(result.tobytes())
        assert len(set(of_ranks)) == 1, text
        assert not result[LAYOUT.gaps()].any(), text
        received += result
        comm.Barrier()
    values = comm.bcast(dict(sums.extra_state().get("compression", (1, {}))[1]))
    errors = [error for name, error in values.items() if name.startswith("residual")]
    assert len(errors) == (hierarchy.n_nodes if text else 0)
    sent = sum(total_of(step) for step in range(STEPS))
    np.testing.assert_allclose(received + sum(errors), sent, rtol=0, atol=tolerance)
    exact = sums_of("", hierarchy, rows)
    assert comm.allreduce(sums.bytes_sent) < comm.allreduce(exact.bytes_sent) or not text
    for used in (exact, sums, hierarchy):
        used.free()
    node.Free()


def textbook_powersgd(rank: int, q_before: dict[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
    """Return the approximations of the sums in each step, in float64, in one process."""
    results = []
    errors = [{name: np.zeros(LAYOUT.views(total_of(0))[name].shape) for name in q_before} for _ in set(nodes)]
    for step in range(STEPS):
        of_nodes = [
            sum(grads_of(step, r).astype(np.float64) for r in range(comm.size) if nodes[r] == node)
            for node in sorted(set(nodes))
        ]
        result = {}
        for name, q in q_before.items():
            matrices = [
                LAYOUT.views(grads)[name].reshape(-1, len(q)) + error[name].reshape(-1, len(q))
                for grads, error in zip(of_nodes, errors, strict=True)
            ]
            p = np.linalg.qr(sum(matrix @ q for matrix in matrices))[0]
            q_before[name] = sum(matrix.T @ p for matrix in matrices)
            result[name] = p @ q_before[name].T
            for matrix, error in zip(matrices, errors, strict=True):
                error[name] = matrix - result[name] / len(matrices)
        results.append(result)
    return results


def check_powersgd(rank: int) -> None:
    node = comm.Split(nodes[comm.rank], comm.rank)
    hierarchy = Hierarchy(comm, node, cores)
    rows = hierarchy.shared.allocate((node.size, LAYOUT.size), np.float32)
    result = hierarchy.shared.allocate((LAYOUT.size,), np.float32)
    sums = PowerSums(hierarchy, BUCKETS, LAYOUT, rows[node.rank], rank, seed=3)
    q = comm.bcast(dict(sums.extra_state().get("compression", (1, {}))[1])).get("q")
    columns = {"a": 90, "kernel": 24, "b": 33}
    first, start = {}, 0
    for name, m in columns.items():
        first[name] = q[start : start + m * rank].reshape(m, rank).astype(np.float64)
        start += m * rank
    assert start == len(q)
    for step, expected in enumerate(textbook_powersgd(rank, first)):
        step_of(sums, hierarchy, rows, result, step)
        views, exact = LAYOUT.views(result), LAYOUT.views(total_of(step))
        for name in SHAPES:
            wanted = expected[name].reshape(SHAPES[name]) if name in expected else exact[name]
            np.testing.assert_allclose(views[name], wanted, rtol=0, atol=1e-4 * np.abs(wanted).max(), err_msg=name)
        comm.Barrier()
    sums.free()
    hierarchy.free()
    node.Free()


for text, tolerance in (
    ("", 1e-4),
    ("bfloat16", 1e-4),
    ("float16", 1e-4),
    ("int8", 1e-4),
    ("powersgd:2", 1e-3),
    ("own_codecs:Signs", 1e-3),
):
    check(text, tolerance, in_thread=False)
    check(text, tolerance, in_thread=True)
for rank in (1, 3):
    check_powersgd(rank)
assert isinstance(BUCKETS[0], Bucket) and len(BUCKETS) > 1
if comm.rank == 0:
    print("ok")
