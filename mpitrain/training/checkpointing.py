"""Saving during training: which ranks write checkpoints, and how they agree that a checkpoint is complete."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .. import checkpoint
from ..checkpoint import Snapshot
from ..checkpoint.sharded import ShardedWriter, ShardSpec
from ..checkpoint.shared_file import SharedFileWriter
from ..checkpoint.writer import CheckpointWriter
from ..comm.cluster import Cluster, Group
from ..comm.node_leaders import NodeLeaders
from ..errors import CheckpointError, ConfigError
from ..plan.plan import Plan

LARGE_BYTES = 1 << 30  # state size in bytes from which each node writes a shard


class Checkpoints:
    """The checkpoints of a run, on a rank that writes none. Subclasses write.

    Attributes:
        longest_s: Duration of the longest save so far, in seconds; 0 on ranks that write nothing.
        failure: Why the last save failed, or None.
    """

    @property
    def longest_s(self) -> float:
        return 0.0

    @property
    def failure(self) -> str | None:
        return None

    def save(self, snapshot: Snapshot) -> None:
        """Save a checkpoint, in the background if so configured. Collective over the writing ranks."""
        snapshot.release()

    def progress(self) -> None:
        """Advance a background save as far as possible without blocking. Local."""

    def close(self) -> None:
        """Wait until the last checkpoint is on disk, or its save has failed. Collective over the writing ranks."""


class WrittenCheckpoints(Checkpoints):
    """Checkpoints that this rank alone writes, as single files."""

    def __init__(self, writer: CheckpointWriter) -> None:
        self._writer = writer

    @property
    def longest_s(self) -> float:
        return self._writer.longest_s

    @property
    def failure(self) -> str | None:
        return self._writer.failure

    def save(self, snapshot: Snapshot) -> None:
        self._writer.save(snapshot)

    def progress(self) -> None:
        if not self._writer.busy:
            self._writer.finish()  # raises an unexpected error of the save at once, not at the next save

    def close(self) -> None:
        self._writer.close()


class ShardedCheckpoints(WrittenCheckpoints):
    """Sharded checkpoints, on the first worker of a node, which writes the node's shard; the chief completes them.

    Shards are files with an index, or ranges of a shared file. A nonblocking reduction, which does not delay training,
    finds out whether all nodes have written.

    Args:
        leaders: The writing ranks.
        hosts: The hosts of these ranks.
        shards: Writes this node's shard, and on the chief the index.
        writer: Calls ``shards``.
    """

    def __init__(
        self, leaders: NodeLeaders, hosts: list[str], shards: ShardedWriter | SharedFileWriter, writer: CheckpointWriter
    ) -> None:
        super().__init__(writer)
        self._leaders, self._hosts, self._shards = leaders, hosts, shards
        self._step = -1
        self._awaited = False  # shards are being written, or it is not known yet whether all of them were written

    def save(self, snapshot: Snapshot) -> None:
        self._finish()
        super().save(snapshot)
        self._step, self._awaited = snapshot.step, True

    def progress(self) -> None:
        writer, leaders = self._writer, self._leaders
        if not self._awaited:
            return
        if not leaders.pending and not writer.busy:
            writer.finish()
            leaders.start_max(writer.errno)
        if leaders.pending and leaders.test():
            self._complete()

    def close(self) -> None:
        self._finish()
        super().close()

    def _finish(self) -> None:
        """Wait until the checkpoint is on disk, or its save has failed."""
        self._writer.finish()
        self.progress()
        if self._leaders.pending and self._leaders.test(wait=True):
            self._complete()
        self._writer.finish()

    def _complete(self) -> None:
        """Complete the checkpoint, or report that a node failed. Local: other nodes may be a step ahead."""
        self._awaited = False
        number, rank = self._leaders.result
        if number:
            if self._writer.failure is None:  # otherwise the failure was already reported
                self._writer.fail(self._step, f"{os.strerror(number)} ({self._hosts[rank]})", number)
        elif self._leaders.rank == 0:
            self._writer.complete(self._step, self._shards.write_index)


def make_checkpoints(
    cluster: Cluster, plan: Plan, folder: Path, record: Mapping[str, Mapping[str, Any]]
) -> Checkpoints:
    """Return the object that saves checkpoints on this rank. Collective over the workers.

    Args:
        folder: The run's checkpoint directory.
        record: Tables of options, arguments and versions, stored with every checkpoint.
    """
    if cluster.chief:
        checkpoint.remove_unfinished(folder)
    if _is_sharded(cluster, plan):
        return sharded_checkpoints(cluster.training, plan, folder, facts_of_run(plan, record))
    return WrittenCheckpoints(file_writer(plan, folder, record)) if cluster.chief else Checkpoints()


def file_writer(plan: Plan, folder: Path, record: Mapping[str, Mapping[str, Any]]) -> CheckpointWriter:
    """Return a writer of checkpoints as single files; see ``make_checkpoints``. Local."""
    config, facts = plan.config, facts_of_run(plan, record)

    def write(snapshot: Snapshot) -> None:
        path = checkpoint.path_for(folder, snapshot.step)
        checkpoint.write(path, plan.layout, snapshot, config.training.seed, facts, config.saving.save_compression)

    retention = checkpoint.Retention(config.saving.keep, config.saving.keep_every)
    return CheckpointWriter(folder, write, retention, config.saving.save_background)


def facts_of_run(plan: Plan, record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tables that every checkpoint contains besides the state."""
    config = plan.config
    return {"mode": config.parallel.mode, "workers": plan.workers, "servers": config.servers.ps, **record}


def sharded_checkpoints(group: Group, plan: Plan, folder: Path, facts: Mapping[str, Any]) -> Checkpoints:
    """Return the object that saves sharded checkpoints on this rank. Collective over the group.

    Raises:
        ConfigError: On every rank: this MPI library cannot write one file in the background.
    """
    token = group.comm.bcast(secrets.token_hex(4), root=0)
    leaders = NodeLeaders(group)
    team = NodeLeaders(group)  # communicator of the writing thread
    config = plan.config
    with group.agree("preparing to save"):
        if config.saving.save_one_file and config.saving.save_background and not leaders.in_threads:
            raise ConfigError(
                "--save-one-file: this MPI does not support calls from a background thread; add --no-save-background"
            )
    if not leaders.member:
        return Checkpoints()
    shard = ShardSpec(leaders.rank, leaders.size, token)
    shards: ShardedWriter | SharedFileWriter
    if config.saving.save_one_file:
        shards = SharedFileWriter(folder, plan.layout, config.training.seed, facts, team)
    else:
        shards = ShardedWriter(folder, plan.layout, config.training.seed, facts, config.saving.save_compression, shard)
    retention = checkpoint.Retention(config.saving.keep, config.saving.keep_every)
    writer = CheckpointWriter(folder, shards.write, retention, config.saving.save_background, is_sharded=True)
    return ShardedCheckpoints(leaders, leaders.gather(group.host), shards, writer)


def finish_saving(checkpoints: Checkpoints, group: Group) -> None:
    """Wait until the last checkpoint is on disk. Collective over the group.

    Raises:
        CheckpointError: The checkpoint could not be saved.
    """
    checkpoints.close()
    with group.agree("saving the last checkpoint"):
        if checkpoints.failure is not None:
            raise CheckpointError(f"training has ended, but {checkpoints.failure}")


def _is_sharded(cluster: Cluster, plan: Plan) -> bool:
    if plan.config.uses_servers or cluster.n_nodes == 1:
        return False
    if plan.config.saving.save_per_node is not None:
        return plan.config.saving.save_per_node
    return plan.nbytes * len(plan.vectors) >= LARGE_BYTES
