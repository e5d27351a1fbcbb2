"""The treatment of a step whose loss is not finite (``--nan``).

``stop`` ends the run before the update, ``skip`` applies no update, ``ignore`` applies it. On GPUs the kernel
``decide_update`` (``gpu/kernels/step.cu``) applies the same rules on the device, so that no update waits for the host.
The host reads the loss later, and uses ``NonFinitePolicy`` to decide whether the loss ends the run.
"""

from __future__ import annotations

import math

import numpy as np

from ..core.layout import Array
from ..errors import NonFiniteLoss


class NonFinitePolicy:
    """Decides whether a gradient is applied, and whether the run ends.

    Args:
        action: The value of ``--nan``: ``stop``, ``skip`` or ``ignore``.
        workers: The number of workers.
    """

    def __init__(self, action: str, workers: int) -> None:
        self._ignores, self._stops, self._workers = action == "ignore", action == "stop", workers

    def applies(self, loss: float) -> bool:
        """Return whether the gradient of a step with this loss is applied."""
        return math.isfinite(loss) or self._ignores

    def ends_run(self, loss: float) -> bool:
        """Return whether a step with this loss ends the run."""
        return self._stops and not math.isfinite(loss)

    def check(self, loss: float, losses: Array, step: int) -> bool:
        """Return whether a step's gradient is applied. All workers call this method with the same arguments.

        Args:
            loss: The sum of ``losses``.
            losses: Every worker's share of the loss, shape (workers,).
            step: The 0-based step.

        Raises:
            NonFiniteLoss: The sum is not finite and the run ends; on all workers.
        """
        if self.ends_run(loss):
            raise self.error(losses, step, on_all_ranks=True)
        return self.applies(loss)

    def check_own(self, loss: float, worker: int, step: int) -> bool:
        """Return whether the gradient of one worker is applied.

        Raises:
            NonFiniteLoss: The loss is not finite and the run ends; on this worker.
        """
        if self.ends_run(loss):
            losses = np.zeros(self._workers)
            losses[worker] = loss
            raise self.error(losses, step)
        return self.applies(loss)

    def error(self, losses: Array, step: int, on_all_ranks: bool = False) -> NonFiniteLoss:
        """Return the error that names the workers whose loss is not finite.

        Args:
            losses: Shape (workers,). If all are finite, their sum is not.
            on_all_ranks: Whether all workers have all losses, and so raise the same error.
        """
        not_finite = np.flatnonzero(~np.isfinite(losses))
        ranks = [str(rank) for rank in (not_finite if len(not_finite) else range(len(losses)))]
        more = " ..." * (len(ranks) > 8)
        workers = f"worker {ranks[0]}" if len(ranks) == 1 else f"workers {', '.join(ranks[:8])}{more}"
        error = NonFiniteLoss(
            f"the loss is {losses[int(ranks[0])]} at step {step + 1:,} on {workers}; check that the examples are "
            "finite, lower the learning rate, clip the gradient, or pass --nan skip or --nan ignore to continue"
        )
        error.on_all_ranks = on_all_ranks
        return error
