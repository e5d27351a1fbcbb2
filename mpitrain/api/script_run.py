"""The attributes that the parts of a Trainer share: its run, and the position of its loop."""

from __future__ import annotations

from typing import Any

from ..errors import JobError
from ..plan.config import RunConfig
from ..training.script_rank import ScriptRank
from ..training.stepped_loop import SteppedLoop
from .collectives import Collectives


class ScriptRun(Collectives):
    """The base class of ``Trainer``, with the attributes that the loader and the optimizers of a ``Trainer`` use."""

    model: Any
    size: int
    _rank: ScriptRank
    _config: RunConfig
    _loop: SteppedLoop | None = None  # None before and after training
    _epoch: int | None = None  # the present epoch
    _examples = _last = 0  # the number of examples in an epoch; the index of the last epoch
    _has_more = False  # whether this epoch has batches that the loop has not used

    @property
    def device(self) -> Any:
        """The device of the model's parameters, a ``torch.device``."""
        return next(self.model.parameters()).device

    @property
    def sync_gradients(self) -> bool:
        """Whether the loop has the last micro-batch of a step, whose ``step`` updates the parameters; see
        ``accumulate_steps`` and ``virtual_workers``. Always True without them. Local.
        """
        return self._loop is None or self._loop.ends_step

    def _wait_for_workers(self, method: str) -> None:
        if self._loop is not None:
            with self._rank.errors_end_the_run():
                self._loop.check_ends_step(method)
        super()._wait_for_workers(method)

    def _require_loop(self) -> SteppedLoop:
        if self._loop is None:
            raise JobError("training has not begun, or has ended: iterate over trainer.epochs(count)")
        return self._loop
