"""How a run saves: the workers make its state whole, and the chief writes it, or every node its part."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from .. import checkpoint
from ..checkpoint import shared_file as together
from ..checkpoint.sharded import Part, ShardedWriter
from ..checkpoint.shared_file import SharedFileWriter
from ..checkpoint.writer import CheckpointWriter
from ..comm.cluster import Cluster, Group
from ..comm.node_leaders import NodeLeaders
from ..core.layout import Array
from ..errors import CheckpointError, ConfigError
from ..plan.config import RunConfig
from ..plan.plan import Plan
from ..strategy.base import Strategy, Wrap

LARGE_BYTES = 1 << 30  # of state: from here on every node writes a part


class Checkpointing:
    """What the training loop does to save. Construction is collective over the workers.

    Args:
        strategy: Whose vectors, step, position and numbers are saved.
        folder: Of the run's checkpoints.
        record: Kept with every checkpoint: tables of options, arguments, versions.
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
        self._parts: ShardedCheckpointing | None = None
        self._writer: CheckpointWriter | None = None
        if _in_parts(cluster, plan, strategy):
            self._parts = ShardedCheckpointing(cluster.training, plan, folder, about, retention, say)
            self._writer = self._parts.writer
        elif cluster.chief:
            write = partial(_write, folder, plan, about)
            self._writer = CheckpointWriter(folder, write, retention, config.save_background, say)

    def save(self) -> None:
        """Save a checkpoint of this step, beside training if so configured.

        In lockstep collective over the workers, else for the chief alone.
        """
        strategy, writer = self._strategy, self._writer
        if self._parts is not None:
            self._parts.finish()
        if writer is not None:
            writer.wait_for_copy()  # a device's vectors come to where the last ones may still be copied from
        if self._sync:
            vectors = {name: strategy.gather(name) for name in strategy.vectors}
            if writer is not None:
                writer.save(vectors, strategy.step, strategy.data_cursor, strategy.extra_state)
        elif strategy.lockstep or writer is not None:
            copies = {}
            for name in strategy.vectors:
                vector = strategy.gather(name)  # overwritten by the next one, or in the next step
                if writer is not None:
                    copies[name] = vector.copy()
            if writer is not None:
                writer.save(copies, strategy.step, strategy.data_cursor, strategy.extra_state, own=True)
        if self._parts is not None:
            self._parts.begun(strategy.step)

    def before_update(self) -> None:
        """Return when the parameters may change; local, and quick where nothing is being saved.

        In ``sync`` it is enough that who writes waits: nobody updates anything before its gradient is there. What a
        device updates is not what is being saved.
        """
        if self._writer is not None and not self._strategy.on_device:
            self._writer.wait_for_copy()

    def tell(self) -> None:
        """Go on with a save beside training, and say what it had to say; local."""
        if self._writer is not None:
            self._writer.poll()
        if self._parts is not None:
            self._parts.progress()

    def finish(self) -> None:
        """Have the last checkpoint on disk; collective over the workers.

        Raises:
            CheckpointError: It could not be saved.
        """
        if self._parts is not None:
            self._parts.finish()
        with self._group.agree("saving the last checkpoint"):
            if self._writer is not None:
                self._writer.close()
                if self._writer.failure is not None:
                    raise CheckpointError(f"the run has ended, and {self._writer.failure}")
        if self._parts is not None:
            self._parts.free()

    def trace(self, background: Callable[[str], Wrap]) -> None:
        """Have saves beside training recorded; local."""
        if self._writer is not None and self._background:
            background("saving")(self._writer, "write_now", "save")

    @property
    def longest_s(self) -> float:
        """Seconds of the longest save so far; 0 on ranks that write nothing."""
        return 0.0 if self._writer is None else self._writer.longest_s


class ShardedCheckpointing:
    """Every node's first worker writes a part; when all have, the chief makes these a checkpoint.

    Parts are files under an index, or of one file where HDF5 can write that from several nodes. That all have is
    agreed on by a reduction that nobody waits for while training goes on. Methods are collective over the workers, or
    local where nothing else is said; on workers that write nothing they do nothing.
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
        self._team = NodeLeaders(group)  # for the thread that writes
        in_one_file = _together(group, leaders, plan.config)
        self.writer: CheckpointWriter | None = None
        self._say, self._folder = say, folder
        self._step = -1
        self._awaited = False  # parts are being written, or it is not known yet whether all have been
        if leaders.member:
            self._hosts = leaders.gather(group.host)
            config, part = plan.config, Part(leaders.rank, leaders.size, token)
            self._writer: ShardedWriter | SharedFileWriter
            if in_one_file:
                self._writer = SharedFileWriter(folder, plan.layout, config.seed, about, self._team)
            else:
                self._writer = ShardedWriter(folder, plan.layout, config.seed, about, config.save_compression, part)
            self.writer = CheckpointWriter(
                folder, self._writer.write, retention, config.save_background, say, in_parts=True
            )

    def begun(self, step: int) -> None:
        """Note that parts of a checkpoint are being written; local."""
        self._step, self._awaited = step, self.writer is not None

    def progress(self) -> None:
        """Go on as far as that takes no waiting; local."""
        writer, leaders = self.writer, self._leaders
        if writer is None or not self._awaited:
            return
        if not leaders.pending and not writer.busy:
            writer.finish()
            leaders.start_max(writer.errno)
        if leaders.pending and leaders.test():
            self._complete(writer)

    def finish(self) -> None:
        """Have the checkpoint on disk."""
        writer, leaders = self.writer, self._leaders
        if writer is None:
            return
        writer.finish()
        self.progress()
        if leaders.pending and leaders.test(wait=True):
            self._complete(writer)
        writer.finish()

    def free(self) -> None:
        """Give the communicators back."""
        if self._leaders.member:
            self._leaders.free()
            self._team.free()

    def _complete(self, writer: CheckpointWriter) -> None:
        """All parts have been written, or some could not be; local, for others may be a step ahead."""
        self._awaited = False
        number, rank = self._leaders.result
        if number:
            if writer.failure is None:  # otherwise it has been told
                why = f"{os.strerror(number)} ({self._hosts[rank]})"
                writer.failure = f"the checkpoint of step {self._step:,} could not be saved in {self._folder}: {why}"
                self._say(f"{writer.failure}; training goes on, and older checkpoints are as they were")
        elif self._leaders.rank == 0:
            writer.complete(self._step, self._writer.write_index)


def _in_parts(cluster: Cluster, plan: Plan, strategy: Strategy) -> bool:
    if not strategy.lockstep or cluster.n_nodes == 1:
        return False
    if plan.config.save_per_node is not None:
        return plan.config.save_per_node
    return plan.nbytes * len(strategy.vectors) >= LARGE_BYTES


def _together(group: Group, leaders: NodeLeaders, config: RunConfig) -> bool:
    """Whether the leaders are to write one file; collective over the group.

    Raises:
        ConfigError: On every rank: they were told to, and cannot.
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
            raise ConfigError(f"--save-one-file: {lacking[0]}; without it every node writes a file")
    return not lacking


def _lacks(leaders: NodeLeaders, config: RunConfig) -> str:
    """Why this rank cannot write a file together with others; empty where it can."""
    if config.save_background and not leaders.in_threads:
        return "this MPI must not be called beside training, so give --no-save-background"
    return together.lacks()


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
