"""Saving during training: workers gather the state, and the chief writes it, or every node writes a shard."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from .. import checkpoint
from ..checkpoint import shared_file
from ..checkpoint.sharded import ShardedWriter, ShardSpec
from ..checkpoint.shared_file import SharedFileWriter
from ..checkpoint.writer import CheckpointWriter
from ..comm.cluster import Cluster, Group
from ..comm.node_leaders import NodeLeaders
from ..core.layout import Array
from ..errors import CheckpointError, ConfigError
from ..plan.config import RunConfig
from ..plan.plan import Plan
from ..strategy.base import Strategy, Wrap

LARGE_BYTES = 1 << 30  # of state; from this size on, every node writes a shard


class Checkpointing:
    """Saves checkpoints for the training loop. Construction is collective over the workers.

    Args:
        strategy: Its vectors, step, data cursor and extra state are saved.
        folder: The run's checkpoint directory.
        record: Tables of options, arguments and versions, stored with every checkpoint.
        say: Called with a line for the user, on the chief.
    """

    def __init__(
        self,
        cluster: Cluster,
        plan: Plan,
        strategy: Strategy,
        folder: Path,
        record: Mapping[str, Mapping[str, Any]],
        say: Callable[[str], None],
    ) -> None:
        self._group, self._strategy, self._sync = cluster.training, strategy, plan.config.mode == "sync"
        config = plan.config
        self._background = config.save_background
        about = {"mode": config.mode, "workers": plan.workers, "servers": config.ps, **record}
        retention = checkpoint.Retention(config.keep, config.keep_every)
        if cluster.chief:
            checkpoint.remove_unfinished(folder)
        self._sharded: ShardedCheckpointing | None = None
        self._writer: CheckpointWriter | None = None
        if _is_sharded(cluster, plan, strategy):
            self._sharded = ShardedCheckpointing(cluster.training, plan, folder, about, retention, say)
            self._writer = self._sharded.writer
        elif cluster.chief:
            write = partial(_write, folder, plan, about)
            self._writer = CheckpointWriter(folder, write, retention, config.save_background, say)

    def save(self) -> None:
        """Save a checkpoint of this step, in the background if so configured.

        Collective over the workers in lockstep; otherwise chief only.
        """
        strategy, writer = self._strategy, self._writer
        if self._sharded is not None:
            self._sharded.finish()
        if writer is not None:
            writer.wait_for_copy()  # gathering overwrites the host buffer that the last save may still be copying
        if self._sync:
            vectors = {name: strategy.gather(name) for name in strategy.vectors}
            if writer is not None:
                writer.save(vectors, strategy.step, strategy.data_cursor, strategy.extra_state)
        elif strategy.lockstep or writer is not None:
            copies = {}
            for name in strategy.vectors:
                vector = strategy.gather(name)  # overwritten by the next gather or step
                if writer is not None:
                    copies[name] = vector.copy()
            if writer is not None:
                writer.save(copies, strategy.step, strategy.data_cursor, strategy.extra_state, own=True)
        if self._sharded is not None:
            self._sharded.begun(strategy.step)

    def before_update(self) -> None:
        """Wait until the parameters may change. Local, and quick if nothing is being saved.

        In ``sync`` only the writing ranks need to wait, because no rank updates before it has their gradient. A device
        updates its own copy, not the one being saved.
        """
        if self._writer is not None and not self._strategy.on_device:
            self._writer.wait_for_copy()

    def tell(self) -> None:
        """Advance a background save, and report its messages. Local."""
        if self._writer is not None:
            self._writer.poll()
        if self._sharded is not None:
            self._sharded.progress()

    def finish(self) -> None:
        """Wait until the last checkpoint is on disk. Collective over the workers.

        Raises:
            CheckpointError: It could not be saved.
        """
        if self._sharded is not None:
            self._sharded.finish()
        with self._group.agree("saving the last checkpoint"):
            if self._writer is not None:
                self._writer.close()
                if self._writer.failure is not None:
                    raise CheckpointError(f"training has ended, but {self._writer.failure}")
        if self._sharded is not None:
            self._sharded.free()

    def trace(self, background: Callable[[str], Wrap]) -> None:
        """Record background saves. Local."""
        if self._writer is not None and self._background:
            background("saving")(self._writer, "write_now", "save")

    @property
    def longest_s(self) -> float:
        """Duration of the longest save so far, in seconds; 0 on ranks that write nothing."""
        return 0.0 if self._writer is None else self._writer.longest_s


class ShardedCheckpointing:
    """Sharded saving: the first worker of every node writes a shard, then the chief completes the checkpoint.

    Shards are files with an index, or ranges of a shared file if HDF5 supports writing it from several nodes. A
    nonblocking reduction, which does not delay training, finds out whether all nodes have written. Methods are
    collective over the workers unless marked local; on workers that write nothing they do nothing.
    """

    def __init__(
        self,
        group: Group,
        plan: Plan,
        folder: Path,
        about: Mapping[str, Any],
        retention: checkpoint.Retention,
        say: Callable[[str], None],
    ) -> None:
        token = group.comm.bcast(secrets.token_hex(4), root=0)
        self._leaders = leaders = NodeLeaders(group)
        self._team = NodeLeaders(group)  # used by the writing thread
        in_one_file = _use_shared_file(group, leaders, plan.config)
        self.writer: CheckpointWriter | None = None
        self._say, self._folder = say, folder
        self._step = -1
        self._awaited = False  # shards are being written, or it is not yet known whether all were
        if leaders.member:
            self._hosts = leaders.gather(group.host)
            config, shard = plan.config, ShardSpec(leaders.rank, leaders.size, token)
            self._writer: ShardedWriter | SharedFileWriter
            if in_one_file:
                self._writer = SharedFileWriter(folder, plan.layout, config.seed, about, self._team)
            else:
                self._writer = ShardedWriter(folder, plan.layout, config.seed, about, config.save_compression, shard)
            self.writer = CheckpointWriter(
                folder, self._writer.write, retention, config.save_background, say, is_sharded=True
            )

    def begun(self, step: int) -> None:
        """Note that the shards of a checkpoint are being written. Local."""
        self._step, self._awaited = step, self.writer is not None

    def progress(self) -> None:
        """Advance as far as possible without blocking. Local."""
        writer, leaders = self.writer, self._leaders
        if writer is None or not self._awaited:
            return
        if not leaders.pending and not writer.busy:
            writer.finish()
            leaders.start_max(writer.errno)
        if leaders.pending and leaders.test():
            self._complete(writer)

    def finish(self) -> None:
        """Wait until the checkpoint is on disk."""
        writer, leaders = self.writer, self._leaders
        if writer is None:
            return
        writer.finish()
        self.progress()
        if leaders.pending and leaders.test(wait=True):
            self._complete(writer)
        writer.finish()

    def free(self) -> None:
        """Free the communicators."""
        if self._leaders.member:
            self._leaders.free()
            self._team.free()

    def _complete(self, writer: CheckpointWriter) -> None:
        """Complete the checkpoint, or report that a node failed. Local: other nodes may be a step ahead."""
        self._awaited = False
        number, rank = self._leaders.result
        if number:
            if writer.failure is None:  # otherwise already reported
                why = f"{os.strerror(number)} ({self._hosts[rank]})"
                writer.failure = f"the checkpoint of step {self._step:,} could not be saved in {self._folder}: {why}"
                self._say(f"{writer.failure}; training continues, older checkpoints are unchanged")
        elif self._leaders.rank == 0:
            writer.complete(self._step, self._writer.write_index)


def _is_sharded(cluster: Cluster, plan: Plan, strategy: Strategy) -> bool:
    if not strategy.lockstep or cluster.n_nodes == 1:
        return False
    if plan.config.save_per_node is not None:
        return plan.config.save_per_node
    return plan.nbytes * len(strategy.vectors) >= LARGE_BYTES


def _use_shared_file(group: Group, leaders: NodeLeaders, config: RunConfig) -> bool:
    """Return whether the leaders write one shared file. Collective over the group.

    Raises:
        ConfigError: On every rank: ``--save-one-file`` is given, but not supported.
    """
    if config.save_one_file is False or config.save_compression != "none":
        return False
    lacking: list[str] = []
    if leaders.member:
        lacks = _lacks(leaders, config)
        lacking = [why for why in leaders.gather(lacks and f"{lacks} (on {group.host})") if why]
    lacking = group.comm.bcast(lacking, root=0)
    with group.agree("preparing to save"):
        if lacking and config.save_one_file:
            raise ConfigError(f"--save-one-file: {lacking[0]}; remove it to write one file per node")
    return not lacking


def _lacks(leaders: NodeLeaders, config: RunConfig) -> str:
    """Return why this rank cannot write a shared file; empty if it can."""
    if config.save_background and not leaders.in_threads:
        return "this MPI does not support calls from a background thread; add --no-save-background"
    return shared_file.lacks()


def _write(
    folder: Path,
    plan: Plan,
    about: Mapping[str, Any],
    vectors: Mapping[str, Array],
    step: int,
    data_cursor: int,
    extra_state: Mapping[str, float] | None,
) -> None:
    config, path = plan.config, checkpoint.path_for(folder, step)
    checkpoint.write(
        path, plan.layout, vectors, step, data_cursor, config.seed, about, config.save_compression, extra_state
    )
