"""How a run saves: the workers make its state whole, and the chief writes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from . import checkpoint
from .checkpoint.saver import Saver
from .cluster import Cluster
from .errors import CheckpointError
from .plan import Plan
from .strategy.base import Strategy


class Saving:
    """What the training loop does to save. Construction is local.

    Args:
        strategy: Whose vectors, step and position are saved.
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
        self._saver = _make_saver(plan, folder, record, say) if cluster.chief else None

    def save(self) -> None:
        """Save a checkpoint of this step, beside training if so configured.

        In lockstep collective over the workers, else for the chief alone.
        """
        strategy, saver = self._strategy, self._saver
        if self._sync:
            vectors = {name: strategy.complete(name) for name in strategy.vectors}
            if saver is not None:
                saver.save(vectors, strategy.step, strategy.position)
        elif strategy.lockstep or saver is not None:
            copies = {}
            for name in strategy.vectors:
                vector = strategy.complete(name)  # overwritten by the next one, or in the next step
                if saver is not None:
                    copies[name] = vector.copy()
            if saver is not None:
                saver.save(copies, strategy.step, strategy.position, own=True)

    def before_update(self) -> None:
        """Return when the parameters may change; local, and quick where nothing is being saved.

        In ``sync`` it is enough that the chief waits: nobody updates anything before its gradient is there.
        """
        if self._saver is not None:
            self._saver.wait_for_copy()

    def tell(self) -> None:
        """Say what a save beside training had to say; local."""
        if self._saver is not None:
            self._saver.poll()

    def finish(self) -> None:
        """Have the last checkpoint on disk; collective over the workers.

        Raises:
            CheckpointError: It could not be saved.
        """
        with self._group.agree("saving the last checkpoint"):
            if self._saver is not None:
                self._saver.close()
                if self._saver.failure is not None:
                    raise CheckpointError(f"the run has ended, and {self._saver.failure}")

    @property
    def longest_s(self) -> float:
        """Seconds of the longest save so far; 0 on other ranks than the chief."""
        return 0.0 if self._saver is None else self._saver.longest_s


def _make_saver(plan: Plan, folder: Path, record: Mapping[str, Mapping[str, Any]], say: Callable[[str], None]) -> Saver:
    config = plan.config
    about = {"mode": config.mode, "workers": plan.workers, "servers": config.ps, **record}
    retention = checkpoint.Retention(config.keep, config.keep_every)
    return Saver(
        folder, plan.layout, config.seed, about, config.save_compression, retention, config.save_background, say
    )
