"""The attributes that the parts of a Trainer share: its run, and the position of its loop."""

from __future__ import annotations

import copy
import itertools
import operator
from typing import Any, NamedTuple

from ..errors import JobError
from ..plan.config import RunConfig
from ..training.script_rank import ScriptRank
from ..training.stepped_loop import SteppedLoop
from .collectives import Collectives


class _MicroBatch(NamedTuple):
    """A micro-batch of a step, with virtual workers.

    Attributes:
        position: Of its first example, in the stream of examples.
        is_last: Whether it is this rank's last one of the step.
        values: The values that the script has given to ``mean``, ``sum`` and ``gather``.
    """

    position: int
    is_last: bool
    values: list[Any]


class ScriptRun(Collectives):
    """The base class of ``Trainer``, with the attributes that the loader and the optimizers of a ``Trainer`` use."""

    model: Any
    size: int
    _rank: ScriptRank
    _config: RunConfig
    _loop: SteppedLoop | None = None  # None before and after training
    _steps_done = 0  # when training has ended
    _epoch: int | None = None  # the present epoch
    _examples = _last = 0  # the number of examples in an epoch; the index of the last epoch
    _has_asked = False  # whether the script has read ``sync_gradients`` since it got the last batch
    _micro_batches: list[_MicroBatch]  # of a step, with virtual workers, until the next step or the end of the epoch
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
        self._has_asked = True
        return self._loop is None or self._loop.ends_step

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all workers, in rank order; tensors are on the CPU. Collective over the workers.

        With virtual workers, call it, ``mean`` and ``sum`` for every micro-batch of a step: after the last one, if
        ``sync_gradients``, they have the values of all micro-batches of all ranks, in their order; before, only this
        one.

        Args:
            value: A number, a string, a tensor on any device, or any other object that can be pickled.

        Raises:
            JobError: It was not called for every micro-batch.
        """
        if not self._micro_batches:
            return super().gather(value)
        value = value.detach().cpu() if hasattr(value, "detach") else value
        *earlier, micro_batch = self._micro_batches
        index = len(micro_batch.values)
        micro_batch.values.append(value if micro_batch.is_last else copy.deepcopy(value))  # the script may change it
        if not micro_batch.is_last:
            return [value]
        with self._rank.errors_end_the_run():
            if any(len(each.values) <= index for each in earlier):
                raise JobError(
                    "mean, sum or gather of the Trainer was not called for every micro-batch of a step: with "
                    "--virtual-workers, call it for each, and use what the last call returns, if trainer.sync_gradients"
                )
        of_ranks = self._gather_of_ranks([(each.position, each.values[index]) for each in self._micro_batches])
        return [each for _, each in sorted(itertools.chain(*of_ranks), key=operator.itemgetter(0))]

    def _check_options(self) -> None:
        """Check that no option of an optimizer has changed between the micro-batches of a step."""
        raise NotImplementedError

    def _begin_micro_batch(self, position: int) -> None:
        """Prepare for the calls of ``gather`` for the micro-batch at this position of the stream of examples. Local."""
        loop = self._require_loop()
        if loop.plan.config.virtual_workers is None:
            return
        self._check_options()
        self._has_asked = False
        if self._micro_batches and self._micro_batches[-1].is_last:
            self._micro_batches.clear()
        self._micro_batches.append(_MicroBatch(position, loop.ends_step, []))

    def _wait_for_workers(self, method: str) -> None:
        if self._loop is not None:
            with self._rank.errors_end_the_run():
                self._loop.check_ends_step(method)
        super()._wait_for_workers(method)

    def _require_loop(self) -> SteppedLoop:
        if self._loop is None:
            raise JobError("training has not begun, or has ended: iterate over trainer.epochs(count)")
        return self._loop
