"""What happens beside training: logging, validation, checkpoints. A job file may add hooks of its own."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .train import Loop


class Hook:
    """Called by the training loop on every worker, all of them at the same steps.

    So a method may communicate over ``loop.cluster.workers``; only the chief should print or write files.
    """

    def begin(self, loop: Loop) -> None:
        """Called once, before the first step."""

    def after_step(self, loop: Loop) -> None:
        """Called after every step, with ``loop.step`` steps done and ``loop.loss`` the last one's mean loss."""

    def end(self, loop: Loop) -> None:
        """Called once, after the last step."""


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


class Log(Hook):
    """Reports loss, learning rate and speed every N steps: means since the last report.

    The first step's time is not counted: on a machine's first run kernels are compiled in it.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._loss, self._counted, self._skipped = 0.0, 0, 0  # since the last report

    def begin(self, loop: Loop) -> None:
        self._first_step = loop.step + 1
        self._start(loop)

    def after_step(self, loop: Loop) -> None:
        if loop.skipped:
            self._skipped += 1
        else:
            self._loss += loop.loss
            self._counted += 1
        if loop.step == self._first_step:
            self._timed_from = loop.step, loop.training_s
        if _due(loop.step, self._every):
            self._report(loop)
            self._start(loop)

    def _report(self, loop: Loop) -> None:
        steps, seconds = loop.step - self._timed_from[0], loop.training_s - self._timed_from[1]
        measured = {
            "loss": self._loss / self._counted if self._counted else math.nan,
            "learning_rate": loop.learning_rate,
        }
        if steps:
            measured |= {"examples_per_s": steps * loop.global_batch / seconds, "step_s": seconds / steps}
        if self._skipped:
            measured["skipped_steps"] = self._skipped
        loop.report(**measured)

    def _start(self, loop: Loop) -> None:
        self._timed_from = loop.step, loop.training_s
        self._loss, self._counted, self._skipped = 0.0, 0, 0


class _EveryAndAtEnd(Hook):
    """Does something every N steps and at the end, once for a step."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._done_at = -1

    def act(self, loop: Loop) -> None:
        """What is to be done."""
        raise NotImplementedError

    def after_step(self, loop: Loop) -> None:
        if _due(loop.step, self._every):
            self._act(loop)

    def end(self, loop: Loop) -> None:
        if self._done_at != loop.step:
            self._act(loop)

    def _act(self, loop: Loop) -> None:
        self._done_at = loop.step
        self.act(loop)


class Validate(_EveryAndAtEnd):
    """Measures loss and accuracy on the validation examples every N steps and at the end."""

    def act(self, loop: Loop) -> None:
        measured = loop.validate()
        if measured:
            loop.report(**measured)


class Save(_EveryAndAtEnd):
    """Writes a checkpoint every N steps and at the end."""

    def begin(self, loop: Loop) -> None:
        if loop.resumed:
            self._done_at = loop.step

    def act(self, loop: Loop) -> None:
        loop.save()
