"""A PyTorch module on one device: loss and gradient of a batch, in views of the flat vectors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from ..core.extra_state import ExtraState
from ..core.layout import Array
from ..core.ranges import OnReady
from ..core.training_state import TrainingState
from ..data.batch import Batch
from ..errors import JobError
from ..nn.layer import SumOverWorkers
from ..plan.plan import Plan
from ..pytorch.allocator import keep_freed_memory
from ..pytorch.batches import Inputs, arguments_of, inputs_of, seed_torch
from ..pytorch.gradients import Gradients
from ..pytorch.linear import write_gradients
from ..pytorch.modes import evaluating
from ..pytorch.network import TorchNetwork, buffers_of, load_buffers, owners_of, parameters_of
from ..pytorch.rng_lock import exclusive, released
from ..pytorch.sync_batch_norm import synchronize
from .base import Model

_READ_TOO_LATE = (
    "the backward pass reads a parameter, such as one used with detach(), after its gradient is complete and it may "
    "have been updated; pass --bucket-bytes {} to update after the backward pass. Torch reports: {}"
)


class TorchModel(Model):
    """Computes with a PyTorch module whose parameters and gradients are views of the bound vectors.

    The loss is a mean over the batch, as in PyTorch, weighted by the batch's share of the step's examples. Before every
    forward pass torch's random numbers are seeded with the run's seed and the batch's position.

    Args:
        sum_over_workers: Sums a small array over all workers, in place; None if there is only one worker.
    """

    device = torch.device("cpu")

    def __init__(
        self, network: TorchNetwork, plan: Plan, state: TrainingState, sum_over_workers: SumOverWorkers | None = None
    ) -> None:
        super().__init__(plan.config.training.accumulate_steps)
        keep_freed_memory()
        self._training_state = state
        self._module, self._criterion, self._plan = network.model, network.loss, plan
        self._names = [name for name, _ in parameters_of(network.model)]
        self._params = [each for _, each in parameters_of(network.model)]
        self._buffers = buffers_of(network.model)
        self._averaged = owners_of(network.model, self._buffers.averaged)
        self._kept = owners_of(network.model, self._buffers.kept)
        self._initial = {name: (id(each), each._version) for name, each in self._buffers.kept.items()}
        self._seed, self._dtype = plan.config.training.seed, plan.dtype
        self._bfloat16 = plan.config.device.precision == "bfloat16"
        self._gradients = Gradients(self._names, self._params, plan.layout, plan.buckets)
        write_gradients(network.model, self._params, self._gradients)
        self._loss: Any = None
        if sum_over_workers is not None:
            synchronize(network.model, self._summing(sum_over_workers))

    def bind(self, params: Array, grads: Array) -> None:
        super().bind(params, grads)
        self._use(params, grads)

    def _use(self, params: Array, grads: Array) -> None:
        """Make the module's parameters and gradients views of these vectors, which are on its device."""
        values, gradients = self._tensors(params), self._tensors(grads)
        for name, each in zip(self._names, self._params, strict=True):
            each.data = values[name]
        self._gradients.bind([gradients[name] for name in self._names])
        self._state = [values[name] for name in self._buffers.averaged]
        self._increments = [gradients[name] for name in self._buffers.averaged]

    def load_params(self) -> None:
        flags = self._training_state.frozen
        for index, each in enumerate(self._params):  # the first entries of the layout
            flags[index] = not each.requires_grad

    def freeze_as(self, other: TorchModel) -> None:
        """Freeze the parameters that are frozen in another copy of the module, and no others."""
        for own, theirs in zip(self._params, other._params, strict=True):
            own.requires_grad = theirs.requires_grad

    def compute_loss(self, batch: Batch) -> Any:
        with exclusive():
            return self._compute_loss(batch)

    def _compute_loss(self, batch: Batch) -> Any:
        inputs = self._inputs(batch)
        self.begin_forward(batch.position)
        with self._autocast():
            loss = self._criterion(self._module(*inputs.args, **inputs.kwargs), inputs.labels)
        return self.end_forward(loss, batch.count)

    def _inputs(self, batch: Batch) -> Inputs:
        """Return the arguments of the module, and the labels."""
        return inputs_of(batch, self._dtype, self.device)

    def use_device(self) -> None:
        """Let the calling thread's torch operations run on the device, and in the stream, of this model from now on."""

    def begin_forward(self, position: int) -> None:
        """Prepare a forward pass on the micro-batch at this position of the stream of examples."""
        seed_torch(self._seed, position, self.device)
        self._load_buffers()
        self._gradients.begin()
        self._versions = [each._version for each in self._params]

    def end_forward(self, loss: Tensor, count: int) -> Any:
        """Set the loss of a forward pass, the mean over ``count`` examples; return this worker's share of it."""
        if self._versions != [each._version for each in self._params]:
            raise self._changed(self._versions)
        self._loss, self._share = loss, count * self._plan.weight
        self._store_increments()
        return self._result_of(loss.detach() * self._share)

    def _result_of(self, loss: Tensor) -> Any:
        """Return a loss as ``forward`` does."""
        return loss.item()

    @property
    def gradient_version(self) -> int:
        """A number that grows when code other than this package changes gradients in place."""
        return sum(each.grad._version for each in self._params if each.grad is not None)

    def compute_grads(self, on_ready: OnReady) -> None:
        with exclusive():
            self._compute_grads(on_ready)

    def _compute_grads(self, on_ready: OnReady) -> None:
        loss, self._loss = self._loss, None
        with self._gradients.collecting(on_ready):
            if not loss.requires_grad:  # all parameters are frozen, or none was used
                return
            loss.register_hook(self._gradients.note_task)
            try:
                (loss * self._share).backward()  # a gradient as argument would import SymPy
            except RuntimeError as error:
                if "modified by an inplace operation" in str(error) and self._gradients.has_announced:
                    raise JobError(_READ_TOO_LATE.format(self._plan.nbytes, " ".join(str(error).split()))) from error
                raise

    def evaluate(self, batch: Batch) -> tuple[float, int | None]:
        inputs = inputs_of(batch, self._dtype, self.device)
        with self._inference():
            outputs = self._module(*inputs.args, **inputs.kwargs)
            loss = self._criterion(outputs, inputs.labels)
        return float(loss) * batch.count, _correct(outputs, inputs.labels)

    def predict(self, batch: Batch) -> Array:
        args, kwargs = arguments_of(batch, self._dtype, self.device)
        with self._inference():
            outputs = self._module(*args, **kwargs)
        if not isinstance(outputs, Tensor):
            raise JobError(f"the model returns {type(outputs).__name__}, not one tensor; use mpitrain.load")
        return _array(outputs)

    @contextmanager
    def _inference(self) -> Iterator[None]:
        """Prepare the module for inference with the bound parameters."""
        self._load_buffers()
        with evaluating(self._module), torch.no_grad(), self._autocast():
            yield

    @property
    def extra_state(self) -> ExtraState:
        """This worker's buffers that are not part of the vectors; transient ones only if they have changed."""
        kept = {name: owner.get(key) for name, (owner, key) in zip(self._buffers.kept, self._kept, strict=True)}
        changed = {
            name: each
            for name, each in kept.items()
            if each is not None
            and (name not in self._buffers.transient or self._initial[name] != (id(each), each._version))
        }
        return self._buffers.state({name: _array(each) for name, each in changed.items() if each.numel()})

    def load_extra_state(self, state: ExtraState) -> None:
        load_buffers(self._module, self._buffers, state)

    def close(self) -> None:
        """Let the module keep its values in memory of its own: that of the vectors is freed after training."""
        super().close()
        self._load_buffers()
        for each in self._params:
            each.data, each.grad = each.data.clone(), None

    def _load_buffers(self) -> None:
        """Set the averaged buffers to their values in the vectors. The module has copies: workers share the vectors."""
        if self._state:
            with torch.no_grad():
                torch._foreach_copy_([owner[key] for owner, key in self._averaged], self._state)

    def _store_increments(self) -> None:
        """Write how the forward pass has changed the averaged buffers, weighted by this worker's share."""
        with torch.no_grad():
            for (owner, key), before, increment in zip(self._averaged, self._state, self._increments, strict=True):
                torch.sub(owner[key], before, out=increment).mul_(self._share)

    def _summing(self, sum_over_workers: SumOverWorkers) -> SumOverWorkers:
        """Return a sum over the workers that lets other towers compute until they arrive at the sum, too."""

        def sum_while_released(array: Array) -> None:
            with released():
                sum_over_workers(array)

        return sum_while_released

    def _autocast(self) -> Any:
        return torch.autocast(self.device.type, torch.bfloat16) if self._bfloat16 else nullcontext()

    def _tensors(self, vector: Array) -> dict[str, Tensor]:
        """Return the named views of a vector as tensors that share its memory."""
        return {name: from_dlpack(view) for name, view in self._plan.layout.views(vector).items()}

    def _changed(self, versions: Sequence[int]) -> JobError:
        changed = [n for n, e, v in zip(self._names, self._params, versions, strict=True) if e._version != v]
        return JobError(
            f"the forward pass changes {', '.join(changed[:4])}{' ...' * (len(changed) > 4)}, but only the optimizer "
            "may change parameters; use a buffer for values that the forward pass changes"
        )


def _array(buffer: Tensor) -> Array:
    """Return a copy of a buffer; NumPy has no bfloat16."""
    host = buffer.detach().cpu()
    copy: Array = (host.float() if host.dtype == torch.bfloat16 else host).numpy().copy()
    return copy


def _correct(outputs: Any, labels: Any) -> int | None:
    """Return the number of correct predictions if outputs are scores of classes, (batch, classes), else None."""
    if not isinstance(outputs, Tensor) or not isinstance(labels, Tensor) or outputs.dim() != 2 or labels.dim() != 1:
        return None
    if labels.is_floating_point() or len(outputs) != len(labels):
        return None
    return int((outputs.argmax(dim=1) == labels).sum())
