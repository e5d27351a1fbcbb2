"""What precedes and follows the forward pass of a PyTorch module on one device, and its backward pass."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from ..core.ranges import OnReady, announce_nothing
from ..core.words import one_line
from ..data.random_numbers import seed_torch
from ..errors import JobError
from ..plan.plan import Plan
from ..pytorch.buffers import Buffers
from ..pytorch.modes import inference
from .torch_device import TorchDevice
from .torch_params import TorchParams

_READ_TOO_LATE = (
    "the backward pass reads a parameter after its gradient is complete, when it may have been updated (for example, a "
    "parameter used with detach()); pass --bucket-bytes {} to update after the backward pass. Torch reports: {}"
)


class TorchPasses:
    """Prepares and ends forward passes that compute a loss, and computes its gradient.

    Before every forward pass torch's random numbers are seeded with the run's seed and the batch's position.

    Attributes:
        loss: The loss of the last forward pass, whose gradient ``backward`` computes.
    """

    loss: Any = None

    def __init__(
        self, module: nn.Module, plan: Plan, device: TorchDevice, params: TorchParams, buffers: Buffers
    ) -> None:
        self._module, self._plan, self._device, self._buffers = module, plan, device, buffers
        self._names, self._params = params.names, params.tensors
        self._copies, self._gradients = params.copies, params.gradients
        self._seed = plan.config.training.seed
        self._bfloat16 = plan.config.device.precision == "bfloat16"

    def begin_forward(self, position: int, pending: bool = False) -> None:
        """See ``SteppedModel``; the device must be active."""
        self.seed(position)
        if not pending:
            self._buffers.begin_forward()
        self._gradients.begin_forward()
        self._versions = [param._version for param in self._params]

    def seed(self, position: int) -> None:
        """See ``SteppedModel``."""
        seed_torch(self._seed, position, self._device.torch_device)

    def autocast(self) -> Any:
        """Return a context in which operations choose the type of their results, if the run computes in bfloat16."""
        return torch.autocast(self._device.torch_device.type, torch.bfloat16) if self._bfloat16 else nullcontext()

    def end_forward(self, loss: Tensor, count: int, factor: float | None = None) -> Any:
        """See ``SteppedModel``; the device must be active.

        Args:
            factor: Factor of the loss; None for this worker's share of the step's examples.
        """
        if self._versions != [param._version for param in self._params]:
            named = zip(self._names, self._params, self._versions, strict=True)
            changed = [name for name, param, version in named if param._version != version]
            raise JobError(
                f"the forward pass changes {', '.join(changed[:4])}{' ...' * (len(changed) > 4)}, but only the "
                "optimizer may change parameters; use a buffer for values that the forward pass changes"
            )
        share = count * self._plan.weight
        loss = loss.float() if loss.dtype == torch.bfloat16 else loss
        factor = share if factor is None else factor
        self.loss = loss if factor == 1 else loss * factor
        self._buffers.store_increments(share)
        return self._device.loss_of(self.loss.detach())

    def backward(
        self, on_ready: OnReady, kept: Collection[str] | None = (), computed: Collection[str] | None = None
    ) -> None:
        """See ``SteppedModel``."""

        def announce(start: int) -> None:
            with self._device.activate():  # autograd computes for a GPU in a thread of its own
                on_ready(start)

        loss, self.loss = self.loss, None
        announced = on_ready if on_ready is announce_nothing else announce
        added, skipped, inputs = self._indices(kept), set[int](), None  # inputs: autograd's default, all parameters
        if computed is not None:
            chosen = self._indices(computed)
            added, skipped = added & chosen, self._indices(None) - chosen
            inputs = [self._params[i] for i in chosen if self._params[i].requires_grad]
        with self._device.exclusive(), self._gradients.collecting(announced, added, skipped):
            if not loss.requires_grad or inputs == []:  # all parameters are frozen, or none was used
                return
            loss.register_hook(self._gradients.set_task)
            try:
                loss.backward(inputs=inputs)
            except RuntimeError as error:
                if "modified by an inplace operation" in str(error) and self._gradients.has_announced:
                    raise JobError(_READ_TOO_LATE.format(self._plan.nbytes, one_line(error))) from error
                raise

    def end_step(self) -> None:
        """Show the buffers of all workers to the script; the device must be active."""
        self._buffers.end_step()

    def _indices(self, names: Collection[str] | None) -> set[int]:
        """Return the indices of the parameters with these names; None: of all parameters."""
        if not names:
            return set() if names is not None else set(range(len(self._names)))
        return {index for index, name in enumerate(self._names) if name in names}

    def mark_updated(self, names: Collection[str] | None) -> None:
        """See ``SteppedModel``."""
        self._copies.load()
        named = zip(self._names, self._params, strict=True)
        increment_version([param for name, param in named if names is None or name in names])
        self._versions = [param._version for param in self._params]

    @contextmanager
    def inference(self) -> Iterator[None]:
        """Prepare the module for inference with the bound parameters."""
        with self._device.activate():
            self._buffers.begin_step()
            self._buffers.load()
            self._copies.load()
            with inference(self._module), self.autocast():
                yield
