"""Restarts from memory: hosts keep the newest state in memory, and the ranks of the next attempt continue from it."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..checkpoint.memory import StateInMemory, StateWriter, read_state, state_key, states
from ..comm.cluster import Cluster
from ..comm.mpi import MPI
from ..core.extra_state import StoredState
from ..core.layout import Array
from ..core.ranges import aligned_range
from ..errors import CheckpointError
from ..monitor.trace import span
from ..plan.hook import Hook, TrainingLoop
from ..plan.plan import Plan
from ..plan.progress import ConsistentPoint, Progress
from ..process.launcher_env import KEEPS_STATE
from ..process.rank_status import RUN_DIR_VARIABLE, is_watched
from ..strategy.base import SharedVectors
from .checkpointing import facts_of_run
from .run_state import RunState

_log = logging.getLogger(__name__)

REASON = "keep in memory"  # the reason with which a consistent point is requested
_SHARE = 0.01  # maximum fraction of the training time that saves in memory may take
_PIECE = 1 << 28  # maximum number of elements in a message


def kept_run_dir(folder: Path) -> str | None:
    """Return the run directory whose newest state is kept in memory; None if ``mpitrain run`` has not requested this.

    Args:
        folder: The directory of the training.
    """
    return os.environ[RUN_DIR_VARIABLE] if KEEPS_STATE in os.environ and is_watched(folder) else None


def make_state_writer(
    cluster: Cluster, plan: Plan, run_dir: str, synchronous: bool, record: Mapping[str, Any]
) -> StateWriter | None:
    """Return the writer of this host's states; None on ranks that write none. Local.

    If all workers take the same steps, the first worker of each host has a writer; otherwise only the chief has one.
    These ranks have complete snapshots.

    Args:
        record: As for ``make_checkpoints``.
    """
    writer = next(rank for rank in cluster.worker_ranks if cluster.host_of[rank] == cluster.host)
    if cluster.rank != (writer if synchronous else cluster.chief_rank):
        return None
    return StateWriter(run_dir, _key_of(plan), plan.layout, plan.config.training.seed, facts_of_run(plan, record))


class KeepInMemory(Hook):
    """Keeps the newest state in memory, as often as about 1 % of the training time allows, by the chief's clock.

    Args:
        writer: Writes the state; None on ranks that write none.
    """

    purpose = "saving"

    def __init__(self, state: RunState, writer: StateWriter | None) -> None:
        self._state, self._writer = state, writer
        self._is_requested = self._has_failed = False
        self._began = self._due_at = self._stepped_at = 0.0
        self._seconds: list[float] = []  # durations of the last few saves in memory

    def begin(self, loop: TrainingLoop) -> None:
        self._chief = loop.cluster.chief
        self._began = self._due_at = time.perf_counter()

    def after_step(self, loop: TrainingLoop) -> None:
        if self._chief and not self._has_failed:
            self._stepped_at = time.perf_counter()
            if self._stepped_at >= self._due_at and not self._is_requested:
                self._is_requested = True
                loop.request_pause(REASON)

    def at_consistent_point(self, loop: TrainingLoop, point: ConsistentPoint) -> None:
        if REASON not in point.reasons:
            return
        with span("save"):
            snapshot = self._state.snapshot()
            if self._writer is not None and not self._has_failed:
                try:
                    self._writer.write(snapshot)
                except OSError as error:
                    self._has_failed = True
                    self._writer.remove()
                    _log.warning(
                        "the state cannot be kept in memory: %s; a restart resumes from the newest checkpoint",
                        error.strerror or error,
                    )
            snapshot.release()
        self._is_requested = False
        now = time.perf_counter()
        self._seconds = [*self._seconds[-2:], now - self._stepped_at]
        # The first save in memory also allocates memory and opens connections, and at any save other ranks may be late.
        # At the beginning, the interval is therefore at most the time since the beginning.
        self._due_at = now + min(min(self._seconds) / _SHARE, now - self._began)

    def end(self, loop: TrainingLoop) -> None:
        """Remove this host's states, because the last checkpoint is on disk."""
        if self._writer is not None:
            self._writer.remove()


def resume_from_memory(
    cluster: Cluster,
    plan: Plan,
    vectors: dict[str, Array] | None,
    shared_vectors: SharedVectors | None,
    run_dir: str | None,
    newer_than: int,
) -> tuple[Progress, StoredState] | None:
    """Fill the vectors with the newest state in memory of any host. Collective over all ranks.

    Args:
        vectors: The vectors of this rank, by name; None if it has none.
        shared_vectors: Memory that this rank fills together with others; None if there is none.
        run_dir: See ``kept_run_dir``.
        newer_than: Use only a state of a higher step than this.

    Returns:
        None on all ranks if there is no newer state. Otherwise the progress and the extra state, valid on ranks with
        vectors.

    Raises:
        CheckpointError: The newest state is of another model, optimizer or seed; on all ranks.
    """
    if run_dir is None:
        return None
    step, root, state = _newest(cluster, run_dir, _key_of(plan), newer_than)
    if step <= newer_than:
        return None
    lacks = vectors is not None and state is None
    with cluster.agree("reading the state in memory"):
        restored = Progress(step, 0), StoredState()
        if state is not None and shared_vectors is not None:
            comm = shared_vectors.comm
            part = aligned_range(0, plan.layout.size, comm.rank, comm.size)
            restored = read_state(state.path, shared_vectors.vectors, *part)
        elif state is not None and vectors is not None:
            restored = read_state(state.path, vectors)
    if cluster.any(lacks):
        restored = _send(cluster, plan, state, vectors, restored, root, lacks)
    return restored


def _newest(cluster: Cluster, run_dir: str, key: str, newer_than: int) -> tuple[int, int, StateInMemory | None]:
    """Return the newest step of which a host keeps a state, a rank of such a host, and the state if it is on this host.

    Collective over all ranks. The step is -1 if there is none.

    Raises:
        CheckpointError: There is a newer state with another key; on all ranks.
    """
    here = {state.step: state for state in reversed(states(run_dir, key))}
    newest = max((state.step for state in states(run_dir)), default=-1)
    everywhere = cluster.comm.allgather((max(here, default=-1), newest))
    step, newest = (max(steps) for steps in zip(*everywhere, strict=True))
    if newest > max(step, newer_than):
        raise CheckpointError(
            f"the state of step {newest:,} in memory does not match the model, the optimizer or --seed; undo the "
            "change, pass --resume never to start from the beginning, or another --run-dir",
            on_all_ranks=True,
        )
    root = next(rank for rank, (of_rank, _) in enumerate(everywhere) if of_rank == step)
    return step, root, here.get(step)


def _send(
    cluster: Cluster,
    plan: Plan,
    state: StateInMemory | None,
    vectors: dict[str, Array] | None,
    restored: tuple[Progress, StoredState],
    root: int,
    lacks: bool,
) -> tuple[Progress, StoredState]:
    """Send a state from rank ``root`` to the ranks that lack it. Collective over all ranks."""
    member = lacks or cluster.rank == root
    comm = cluster.comm.Split(0 if member else MPI.UNDEFINED, key=0 if cluster.rank == root else 1 + cluster.rank)
    if not member:
        return restored
    if vectors is None:
        assert state is not None
        vectors = {name: np.empty(plan.layout.size, plan.dtype) for name in plan.vectors}
        restored = read_state(state.path, vectors)
    for name in sorted(plan.vectors):
        for lo in range(0, plan.layout.size, _PIECE):
            comm.Bcast(vectors[name][lo : lo + _PIECE])
    restored = comm.bcast(restored)
    comm.Free()
    return restored


def _key_of(plan: Plan) -> str:
    return state_key(plan.layout, plan.vectors, plan.dtype, plan.config.training.seed)
