"""A PyTorch module on one device: loss and gradient of a batch, in views of the flat vectors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.utils.dlpack import from_dlpack

from ..core.extra_state import ExtraState
from ..core.host_memory import keep_freed_memory
from ..core.layout import Array
from ..core.ranges import Bucket, OnReady, announce_nothing
from ..core.training_state import TrainingState
from ..core.words import one_line
from ..data.batch import Batch, CollatedBatch, IndexBatch
from ..data.checks import check_classes
from ..data.random_numbers import seed_torch
from ..data.split import Split
from ..errors import JobError
from ..nn.layer import SumOverWorkers
from ..plan.metric import Totals
from ..plan.plan import Plan
from ..pytorch.batches import TORCH_DTYPES, Inputs, arguments_of, to_tensor
from ..pytorch.bfloat16 import Bfloat16Copies, is_copied, to_array, to_bfloat16
from ..pytorch.gradients import Gradients
from ..pytorch.linear import write_gradients
from ..pytorch.modes import inference
from ..pytorch.names import parameters_of
from ..pytorch.network import TorchNetwork, buffers_of, load_buffers, owners_of
from ..pytorch.outputs import are_scores, correct_predictions, on_host
from ..pytorch.sync_batch_norm import synchronize
from .base import Model, OnOutputs
from .torch_device import TorchDevice

_READ_TOO_LATE = (
    "the backward pass reads a parameter after its gradient is complete, when it may have been updated (for example, a "
    "parameter used with detach()); pass --bucket-bytes {} to update after the backward pass. Torch reports: {}"
)
_SAMPLED = 256  # number of elements that are sampled to detect changes of the parameters
_INDEXABLE = ("bool", "uint8", "int8", "int16", "int32", "int64", "float32", "float64")  # by torch's index_select


class TorchModel(Model):
    """A PyTorch module whose parameters and gradients are views of the bound vectors, on one device.

    The loss is a mean over the batch, as in PyTorch, weighted by the batch's share of the step's examples. Before every
    forward pass torch's random numbers are seeded with the run's seed and the batch's position. The class implements
    ``SteppedModel``, too.

    Args:
        split: The training data.
        state: Its ``frozen`` is set to the parameters that do not require a gradient.
        sum_over_workers: Sums a small array over all workers, in place; None if there is only one worker.
        announces: Whether buckets are announced during the backward pass; this takes a hook for each parameter.
    """

    def __init__(
        self,
        network: TorchNetwork,
        plan: Plan,
        device: TorchDevice,
        split: Split,
        state: TrainingState,
        sum_over_workers: SumOverWorkers | None = None,
        announces: bool = True,
    ) -> None:
        keep_freed_memory()
        self._module, self._criterion, self._plan = network.model, network.criterion, plan
        self._inputs_of, self._takes_labels = network.inputs_of, network.loss is None
        self._device, self._training_state, self._split = device, state, split
        if device.torch_device.type != "cpu":
            with device.activate():
                network.model.to(device.torch_device)
        self._names = [name for name, _ in parameters_of(network.model)]
        self._params = [param for _, param in parameters_of(network.model)]
        self._buffers = buffers_of(network.model)
        self._averaged = owners_of(network.model, self._buffers.averaged)
        self._kept = owners_of(network.model, self._buffers.kept)
        self._initial = {name: (id(buffer), buffer._version) for name, buffer in self._buffers.kept.items()}
        self._copies = Bfloat16Copies(self._names, self._params)
        self._seed, self._dtype = plan.config.training.seed, plan.dtype
        self._bfloat16 = plan.config.device.precision == "bfloat16"
        buckets = plan.buckets if announces else [Bucket(0, plan.layout.size)]
        self._gradients = Gradients(self._names, self._params, plan.layout, buckets, not plan.shows_grads)
        if device.torch_device.type == "cpu":  # on a GPU a copy takes less time than a call of Python
            write_gradients(network.model, self._params, self._gradients)
        self._takes_bfloat16 = network.is_bfloat16
        self._input_dtype = torch.bfloat16 if network.is_bfloat16 else TORCH_DTYPES[plan.dtype.char]
        self._loss: Any = None
        self._frozen: list[bool] = []  # the values in the training state
        self._recorded = b""
        starts = [entry.start for entry in plan.layout.entries if entry.kind == "param"]
        self._sample = np.unique([*np.linspace(0, plan.layout.n_trained - 1, _SAMPLED).astype(np.int64), *starts])
        self._scale = None if network.takes_integers(split) else split.scale
        self._cached: list[Tensor] = []  # training examples and labels, if they are on the device
        self._exact, self._sum_over_workers = plan.config.training.exact_mean, sum_over_workers
        self._factor: float | None = None  # of the sum of the losses of a micro-batch, if the mean is exact
        if sum_over_workers is not None:
            synchronize(network.model, device.summing(sum_over_workers))

    def bind(self, params: Array, grads: Array) -> None:
        with self._device.activate():
            values, gradients = self._tensors(params), self._tensors(grads)
            for name, param in zip(self._names, self._params, strict=True):
                if not is_copied(param):
                    param.data = values[name]
            self._copies.bind(values)
            self._flat_params, self._data_pointers = params, [param.data_ptr() for param in self._params]
            self._gradients.bind([gradients[name] for name in self._names])
            self._state = [values[name] for name in self._buffers.averaged]
            self._increments = [gradients[name] for name in self._buffers.averaged]

    def load_params(self) -> None:
        self.show_params()
        self.note_frozen()

    def note_frozen(self) -> None:
        frozen = [not param.requires_grad for param in self._params]
        if frozen != self._frozen:
            self._frozen = frozen
            self._training_state.frozen[: len(frozen)] = frozen  # the first entries of the layout

    def freeze(self, flags: Array) -> None:
        for param, flag in zip(self._params, flags, strict=False):
            param.requires_grad = not flag

    def begin_step(self, batch: Batch) -> None:
        if self._exact:
            with self._device.activate():
                count = np.array([self._criterion.count(self._labels_of(batch), batch.count)], np.float64)
            if self._sum_over_workers is not None:
                self._sum_over_workers(count)
            self._factor = 1 / float(count[0]) if count[0] else 0.0

    def compute_loss(self, batch: Batch) -> Any:
        with self._device.exclusive():
            inputs = self._inputs(batch)
            self._begin_forward(batch.position)
            with self._autocast():
                outputs = self._module(*inputs.args, **inputs.kwargs)
                loss = self._loss_of(outputs, inputs.labels, batch, self._split)
            return self._end_forward(loss, batch.count, self._factor)

    def compute_grads(self, on_ready: OnReady) -> None:
        self.backward(on_ready)

    def add_loss(self, total: Any, loss: Any) -> Any:
        with self._device.activate():
            return self._device.add_loss(total, loss)

    # The members of ``SteppedModel``.

    @property
    def stepped(self) -> TorchModel:
        return self

    def use_device(self) -> None:
        self._device.use()

    def begin_forward(self, position: int, pending: bool = False) -> None:
        with self._device.activate():
            self._begin_forward(position, pending)

    def end_forward(self, loss: Tensor, count: int, factor: float = 1.0) -> Any:
        with self._device.activate():
            share = self._end_forward(loss, count)
            if factor != 1:
                self._loss = self._loss * factor
            return share

    def backward(
        self, on_ready: OnReady, kept: Collection[str] | None = (), computed: Collection[str] | None = None
    ) -> None:
        def announce(start: int) -> None:
            with self._device.activate():  # autograd computes for a GPU in a thread of its own
                on_ready(start)

        loss, self._loss = self._loss, None
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

    def _indices(self, names: Collection[str] | None) -> set[int]:
        """Return the indices of the parameters with these names; None: of all parameters."""
        if not names:
            return set() if names is not None else set(range(len(self._names)))
        return {index for index, name in enumerate(self._names) if name in names}

    def show_grads_in(self, shown: Array, fetch: Callable[[], None]) -> None:
        tensors = self._tensors(shown)
        self._gradients.show_in([tensors[name] for name in self._names], fetch)

    def collect_grads(self, fetch: Callable[[], None]) -> None:
        self._gradients.attach(fetch)

    def load_grads(self) -> None:
        """Do nothing: the bound gradient is on the device."""

    def hide_grads(self) -> None:
        self._gradients.hide()

    @property
    def copies_grads(self) -> bool:
        return self.copies_params

    def show_grads(self) -> None:
        self._gradients.show()

    def show_params(self) -> None:
        with self._device.activate():
            self._copies.load()

    def store_params(self) -> None:
        self._copies.store()

    @property
    def copies_params(self) -> bool:
        return bool(self._copies.names)

    def mark_updated(self, names: Collection[str] | None) -> None:
        self._copies.load()
        named = zip(self._names, self._params, strict=True)
        increment_version([param for name, param in named if names is None or name in names])
        self._versions = [param._version for param in self._params]

    def record_params(self) -> None:
        self._recorded = self._flat_params[self._sample].tobytes()
        self._copies.record()

    def check_params(self) -> None:
        values = self._flat_params[self._sample]
        name = self._copies.changed()
        if self._recorded != values.tobytes():
            before = np.frombuffer(self._recorded, values.dtype)
            index = int(self._sample[np.flatnonzero(before != values)[0]])
            name = next(entry.name for entry in self._plan.layout.entries if entry.start <= index < entry.stop)
        if name is not None:
            raise JobError(
                f"the loop has changed the parameter {name} directly, but the node's ranks share it, or "
                f"keep it in float32: use the optimizer, or "
                f"pass a function that changes the parameter to trainer.change_parameters"
            )

    def check_data_pointers(self) -> None:
        for name, param, pointer in zip(self._names, self._params, self._data_pointers, strict=True):
            if param.data_ptr() != pointer:
                raise JobError(
                    f"the loop has replaced the data of the parameter {name}, so that updates no longer reach it: "
                    "change it in place, in a function that is passed to trainer.change_parameters"
                )

    # Inference.

    def evaluate(self, batch: Batch, on_outputs: OnOutputs | None = None) -> Totals:
        with self.inference():
            inputs = self._inputs_of(batch, self._dtype, self._device.torch_device)
            outputs = self._module(*inputs.args, **inputs.kwargs)
            if on_outputs is not None:
                on_outputs(on_host(outputs), on_host(inputs.labels))
            loss, criterion, labels = self._loss_of(outputs, inputs.labels, batch), self._criterion, inputs.labels
            correct = correct_predictions(outputs, labels, criterion.ignore_index)
            return Totals(float(loss), criterion.count(labels, batch.count), *correct)

    def predict(self, batch: Batch) -> Array:
        with self.inference():
            args, kwargs = arguments_of(batch, self._dtype, self._device.torch_device)
            if self._takes_bfloat16:
                args, kwargs = to_bfloat16(args), to_bfloat16(kwargs)
            outputs = self._module(*args, **kwargs)
        if not isinstance(outputs, Tensor):
            kind = type(outputs).__name__
            raise JobError(f"the model returns {kind}, must be one tensor; load it with mpitrain.load(RUN) and call it")
        return _array(outputs)

    @contextmanager
    def inference(self) -> Iterator[None]:
        """Prepare the module for inference with the bound parameters."""
        with self._device.activate():
            self._load_buffers()
            self._copies.load()
            with inference(self._module), self._autocast():
                yield

    # State and memory.

    def extra_state(self) -> ExtraState:
        """Return this worker's buffers that are not in the vectors; transient buffers only if they have changed."""
        kept = {name: owner.get(key) for name, (owner, key) in zip(self._buffers.kept, self._kept, strict=True)}
        changed = {
            name: buffer
            for name, buffer in kept.items()
            if buffer is not None
            and (name not in self._buffers.transient or self._initial[name] != (id(buffer), buffer._version))
        }
        return self._buffers.state({name: _array(buffer) for name, buffer in changed.items() if buffer.numel()})

    def load_extra_state(self, state: ExtraState) -> None:
        load_buffers(self._module, self._buffers, state)

    def has_room(self, examples: Array, labels: Array) -> bool:
        indexable = all(array.dtype.name in _INDEXABLE for array in (examples, labels))
        return indexable and self._device.has_room(examples, labels)

    def cache_dataset(self, examples: Array, labels: Array) -> None:
        with self._device.activate():
            self._cached = [
                torch.from_numpy(array).to(self._device.torch_device, copy=True) for array in (examples, labels)
            ]

    def memory_use(self) -> dict[str, int]:
        return self._device.memory_use()

    def activate(self) -> AbstractContextManager[object]:
        return self._device.activate()

    def to_host(self, vector: Array) -> Array:
        return self._device.to_host(vector)

    def close(self) -> None:
        """Let the module keep its values in its own memory: the vectors' memory is freed after training."""
        with self._device.activate():
            self._load_buffers()
            self._copies.load()
            for param in self._params:
                param.data, param.grad = param.data.clone(), None
        self._device.synchronize()

    # A pass.

    def _labels_of(self, batch: Batch) -> Any:
        """Return the labels of a batch, without its examples if these are arrays."""
        if isinstance(batch, IndexBatch):
            return self._cached[1].index_select(0, self._device.upload_indices(batch.examples))
        if isinstance(batch, CollatedBatch):
            return self._inputs_of(batch, self._dtype).labels
        return to_tensor(batch.labels, self._dtype)

    def _inputs(self, batch: Batch) -> Inputs:
        """Return the arguments of the module, and the labels."""
        if not isinstance(batch, IndexBatch):
            return self._inputs_of(batch, self._dtype, self._device.torch_device)
        indices = self._device.upload_indices(batch.examples)
        examples, labels = (tensor.index_select(0, indices) for tensor in self._cached)
        labels = self._converted(labels)
        if self._scale is None:
            examples = self._converted(examples)
        else:
            examples = examples.to(TORCH_DTYPES[self._dtype.char])
            if self._scale != 1:
                examples = examples.mul_(self._scale)
            examples = examples.to(self._input_dtype)
        return Inputs((examples, labels) if self._takes_labels else (examples,), {}, labels)

    def _loss_of(self, outputs: Any, labels: Any, batch: Batch, split: Split | None = None) -> Tensor:
        """Return the mean loss of outputs; in validation and if the mean is exact, the sum (``Criterion.total``).

        Args:
            split: The training data, of whose endless stream the batch is a part; None for validation.

        Raises:
            DataError: A label is not a class.
            JobError: Outputs and labels differ in shape; see ``Criterion``.
        """
        criterion = self._criterion
        criterion.note_broadcast(outputs, labels)
        try:
            if split is None or self._exact:
                return criterion.total(outputs, labels, batch.count)
            return criterion(outputs, labels)
        except IndexError:
            if are_scores(outputs, labels):
                values = labels.detach().cpu().numpy()
                source, first = "validation", np.arange(batch.position, batch.position + batch.count)
                if split is not None:
                    source, first = split.source, split.order(batch.position, batch.count, self._seed)
                values = np.where(values == criterion.ignore_index, 0, values)
                check_classes(source, values, first, outputs.shape[1])
            raise

    def _converted(self, tensor: Tensor) -> Tensor:
        """Convert floats to the parameters' type and integers to int64, as ``to_tensor`` does."""
        return tensor.to(self._input_dtype if tensor.is_floating_point() else torch.int64)

    def _begin_forward(self, position: int, pending: bool = False) -> None:
        seed_torch(self._seed, position, self._device.torch_device)
        if not pending:
            self._load_buffers()
        self._gradients.begin()
        self._versions = [param._version for param in self._params]

    def _end_forward(self, loss: Tensor, count: int, factor: float | None = None) -> Any:
        if self._versions != [param._version for param in self._params]:
            raise self._changed(self._versions)
        self._share = count * self._plan.weight
        loss = loss.float() if loss.dtype == torch.bfloat16 else loss
        factor = self._share if factor is None else factor
        self._loss = loss if factor == 1 else loss * factor
        self._store_increments()
        return self._device.loss_of(self._loss.detach())

    def _load_buffers(self) -> None:
        """Set the averaged buffers to their values in the vectors. The module has copies: workers share the vectors."""
        if self._state:
            with torch.no_grad():
                torch._foreach_copy_([owner[key] for owner, key in self._averaged], self._state)

    def _store_increments(self) -> None:
        """Write how the forward pass has changed the averaged buffers, weighted by this worker's share."""
        if not self._state:
            return
        with torch.no_grad():
            for (owner, key), before, increment in zip(self._averaged, self._state, self._increments, strict=True):
                torch.sub(owner[key], before, out=increment).mul_(self._share)

    def _autocast(self) -> Any:
        return torch.autocast(self._device.torch_device.type, torch.bfloat16) if self._bfloat16 else nullcontext()

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
    """Return a copy of a buffer."""
    return to_array(buffer).copy()
