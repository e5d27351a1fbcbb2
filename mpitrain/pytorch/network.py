"""A PyTorch module with its loss, before training: a ``plan.network.Network``."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..core.extra_state import ExtraState
from ..core.layout import Array, Layout
from ..core.words import one_line
from ..data.batch import Batch, CollatedBatch
from ..data.split import Split
from ..errors import JobError
from ..optim import Optimizer
from .batches import Inputs, as_split, inputs_of
from .bfloat16 import is_copied, to_array, to_bfloat16
from .buffers import Buffers, owners_of
from .criterion import Criterion
from .modes import evaluating
from .names import aliases_of, parameters_of, plain_name
from .optimizer_state import has_taken_steps
from .outputs import joined
from .translation import translated

_DTYPES = {torch.float32: np.dtype(np.float32), torch.float64: np.dtype(np.float64)}
_WRAPPERS = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "FSDPModule", "ScriptModule")
_SAMPLE = 16  # number of values of each parameter in a digest


class LossInLoop:
    """Takes the place of the loss if the user's own loop computes the loss."""

    def __call__(self, outputs: Any, labels: Any) -> Tensor:
        raise JobError("the loss is computed by the script's own loop; use mpitrain.load to evaluate the model")


class LossOfModel:
    """The loss that a module returns: as a tensor, as ``loss`` of its outputs, or first in a tuple."""

    def __call__(self, outputs: Any, labels: Any) -> Tensor:
        loss = outputs
        if isinstance(outputs, Mapping):
            loss = outputs.get("loss")
        elif isinstance(outputs, (tuple, list)) and not hasattr(outputs, "loss"):
            loss = outputs[0]
        elif not isinstance(outputs, Tensor):
            loss = getattr(outputs, "loss", None)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise JobError(
                f"Job(loss=None): the model returned {type(outputs).__name__} without a loss: must return the loss, or "
                "outputs with .loss or ['loss'], for which modules of transformers need 'labels' among the inputs"
            )
        return loss


class TorchNetwork:
    """A PyTorch module and a loss; see ``plan.network.Network`` for the methods.

    The module is changed only where necessary:

    - lazy parameters get their shapes;
    - parameters of float32 become float64 if the flat vectors are float64;
    - a module in evaluation mode is put in training mode.

    Raises:
        JobError: The module cannot be trained by this package; the message names the part and the reason.
    """

    classes: int | None = None  # number of classes of the labels; torch's losses check the labels
    writes_grads_once = False  # autograd may deliver the gradient of a parameter in parts

    def __init__(self, model: nn.Module, loss: Any) -> None:
        if isinstance(loss, type):
            raise JobError(f"Job(loss=...) got the class {loss.__name__}: must be an object, {loss.__name__}()")
        if loss is not None and not callable(loss):
            raise JobError(
                f"Job(loss=...) got {loss!r}: must be a torch loss, a function of outputs and labels, or None if the "
                "model computes its loss"
            )
        _check_loss(loss)
        _check_kind(model)
        self.model, self.loss = model, loss
        self.criterion = Criterion(LossOfModel() if loss is None else loss)

    def inputs_of(self, batch: Batch, dtype: Any, device: Any = "cpu") -> Inputs:
        """Return the arguments of the module and the criterion for a batch; see ``batches.inputs_of``.

        If all parameters are bfloat16, floating-point inputs and labels are, too.
        """
        inputs = inputs_of(batch, np.dtype(dtype), device, takes_labels=self.loss is None)
        return to_bfloat16(inputs) if self.is_bfloat16 else inputs  # type: ignore[no-any-return]

    @cached_property
    def is_bfloat16(self) -> bool:
        """Whether all parameters are bfloat16."""
        return all(is_copied(param) for _, param in parameters_of(self.model))

    def as_split(self, dataset: object) -> object:
        return as_split(dataset)

    def rule_of(self, optimizer: Any) -> Any:
        if isinstance(optimizer, Optimizer) or not (
            isinstance(optimizer, torch.optim.Optimizer) or callable(optimizer)
        ):
            return optimizer
        made = optimizer if isinstance(optimizer, torch.optim.Optimizer) else optimizer(self.model.parameters())
        if not isinstance(made, torch.optim.Optimizer):
            raise JobError(f"Job(optimizer=...): the function returned {made!r}, must return an optimizer of torch")
        if has_taken_steps(made):
            raise JobError(f"the optimizer {type(made).__name__} has taken steps already: pass a new one")
        return translated(made, self.model)

    def lay_out(self, train: Split, dtype: Any) -> Layout:
        if self.has_own_loop and any(map(is_lazy, self.model.parameters())):
            raise JobError("the model has lazy parameters: run it once on an example before training")
        batch = None if self.has_own_loop else _first(train, dtype, self)
        if batch is not None and any(map(is_lazy, self.model.parameters())):
            with evaluating(self.model):  # lazy statistics must not contain these examples
                self._run(self.inputs_of(batch, np.float32))  # gives lazy modules their shapes
        _check_parameters(self.model, np.dtype(dtype))
        if np.dtype(dtype) == np.float64:
            self.model.double()
        if not self.model.training:  # otherwise the job file may have put some parts in evaluation mode
            self.model.train()
        if batch is not None:
            self._run(self.inputs_of(batch, dtype))
        return layout_of(self.model)

    def check_validation(self, validation: Split, dtype: Any) -> None:
        if not self.has_own_loop:
            with evaluating(self.model):
                self._run(self.inputs_of(_first(validation, dtype, self), dtype), "of validation")

    def starts(self, layout: Layout) -> list[int]:
        return [entry.start for entry in layout.entries if entry.kind == "param"]

    def initialize(self, layout: Layout, params: Array, seed: int) -> None:
        views = layout.views(params)
        params[...] = 0
        for name, value in [*parameters_of(self.model), *Buffers(self.model).averaged.items()]:
            views[name][...] = to_array(value)

    def takes_integers(self, split: Split) -> bool:
        """Return whether the examples are integers without a scale, such as indices; others are measurements."""
        return split.has_integers and split.scale == 1

    def shown(self, batch: CollatedBatch, dtype: Any) -> Any:
        inputs = self.inputs_of(batch, dtype)
        return (*inputs.args, *([dict(inputs.kwargs)] if inputs.kwargs else []), inputs.labels)

    def joined(self, parts: Sequence[Any]) -> Any:
        return joined(parts)

    @property
    def has_own_loop(self) -> bool:
        return isinstance(self.loss, LossInLoop)

    @property
    def counts_labels(self) -> bool:
        return self.criterion.counts

    @property
    def synchronizes_statistics(self) -> bool:
        return any(isinstance(module, nn.SyncBatchNorm) and module.training for module in self.model.modules())

    @property
    def frozen(self) -> list[str]:
        return [name for name, parameter in parameters_of(self.model) if not parameter.requires_grad]

    def components(self) -> list[tuple[str, str, str]]:
        return [
            (plain_name(path) or "model", type(module).__name__, _shapes(module))
            for path, module in self.model.named_modules()
            if not any(True for _ in module.children())
        ]

    def facts(self) -> dict[str, object]:
        return {"loss": self.criterion.name, "the initial parameters (a digest of some)": self._digest()}

    def _digest(self) -> str:
        digest = hashlib.sha256()
        for _, value in parameters_of(self.model):
            digest.update(to_array(value.detach().reshape(-1)[:_SAMPLE]).tobytes())
        return digest.hexdigest()[:16]

    def _run(self, inputs: Inputs, purpose: str = "of training") -> None:
        """Compute the loss of some examples, to find errors before training. The module's buffers do not change.

        Args:
            inputs: The examples.
            purpose: The use of the examples, for messages.

        Raises:
            JobError: The module or the loss fails, or the loss is not one number.
        """
        owners = owners_of(self.model, [plain_name(name) for name, _ in self.model.named_buffers()])
        before = [(owner, key, owner[key], owner[key].clone()) for owner, key in owners if not is_lazy(owner[key])]
        try:
            loss = self.criterion(self.model(*inputs.args, **inputs.kwargs), inputs.labels)
        except JobError:
            raise
        except Exception as error:
            raise JobError(
                f"the model or its loss fails on the first examples {purpose}, {inputs.describe()}: "
                f"{type(error).__name__}: {one_line(error)}{_advice(inputs)}"
            ) from error
        for owner, key, buffer, values in before:
            buffer.data.copy_(values)
            owner[key] = buffer
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
            got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise JobError(f"the loss returned {got}: must be one floating-point number, the mean over the batch")


def layout_of(model: nn.Module) -> Layout:
    """Return the layout of a module's parameters and averaged buffers."""
    return Layout.pack(
        [
            *((name, tuple(tensor.shape), "param") for name, tensor in parameters_of(model)),
            *((name, tuple(tensor.shape), "state") for name, tensor in Buffers(model).averaged.items()),
        ],
        aliases_of(model),
    )


def load_values(model: nn.Module, layout: Layout, params: Array, extra_state: ExtraState) -> None:
    """Set a module's parameters and buffers to the values in a checkpoint: ``params`` has shape (layout.size,)."""
    values, buffers = layout.views(params), Buffers(model)
    with torch.no_grad():
        for name, tensor in [*parameters_of(model), *buffers.averaged.items()]:
            tensor.copy_(torch.from_numpy(values[name]))
    buffers.load_extra_state(extra_state)


def _first(train: Split, dtype: Any, network: TorchNetwork) -> Batch:
    """Return the first two examples, or the only one. Most layers that compute statistics need two."""
    batch = train.read_batch(0, min(2, len(train)))
    if train.is_array:
        batch.examples = train.scaled(batch.examples, None if network.takes_integers(train) else dtype)
    return batch


def _advice(inputs: Inputs) -> str:
    """Return advice for images of the shape that ``image_folder`` reads; empty for other inputs."""
    are_images = any(isinstance(one, Tensor) and one.dim() == 4 and one.shape[-1] in (1, 3) for one in inputs.args)
    if not are_images:
        return ""
    return (
        "; images are read as bytes, shape (height, width, channels), and convolutions of torch need floating-point "
        "numbers, shape (channels, height, width): convert them with map or random_map"
    )


def _check_kind(model: nn.Module) -> None:
    for path, module in model.named_modules():
        kinds = {kind.__name__ for kind in type(module).__mro__}
        if wrapper := next((name for name in _WRAPPERS if name in kinds), None):
            where = f"{path} is" if path else "the model is"
            raise JobError(f"{where} wrapped in {wrapper}: pass the module that it wraps; --mode selects the averaging")


def _check_loss(loss: Any) -> None:
    reduction = getattr(loss, "reduction", "mean")
    if reduction not in ("mean", "batchmean"):
        raise JobError(
            f"the loss {type(loss).__name__} has reduction={reduction!r}: must be 'mean', "
            "because losses are averaged over examples and workers"
        )
    if isinstance(loss, nn.Module) and any(True for _ in loss.parameters()):
        raise JobError(f"the loss {type(loss).__name__} has parameters: move them to the model")


def _check_parameters(model: nn.Module, dtype: np.dtype[Any]) -> None:
    by_dtype: dict[torch.dtype, str] = {}
    for name, tensor in [*parameters_of(model), *Buffers(model).averaged.items()]:
        if tensor.device.type != "cpu":
            raise JobError(f"the tensor {name} is on {tensor.device}: leave the model on the CPU; ranks move it")
        if tensor.layout != torch.strided:
            raise JobError(f"the tensor {name} is sparse: must be dense")
        if tensor.dtype != torch.bfloat16 or dtype != np.float32:  # otherwise the parameter is a copy of float32 values
            by_dtype.setdefault(tensor.dtype, name)
    if len(by_dtype) > 1:
        dtypes = ", ".join(f"{name} is {dtype}" for dtype, name in by_dtype.items())
        raise JobError(f"the parameters have several dtypes ({dtypes}): convert the model with model.float()")
    for found_dtype, name in by_dtype.items():
        if found_dtype not in _DTYPES:
            raise JobError(
                f"the parameter {name} is {found_dtype}: must be float32, float64, or with --dtype float32 bfloat16; "
                "call model.float()"
            )
        if found_dtype == torch.float64 and dtype != np.float64:
            raise JobError(f"the parameter {name} is float64: pass --dtype float64, or call model.float()")


def _shapes(module: nn.Module) -> str:
    return ", ".join(
        f"{name} {'x'.join(map(str, parameter.shape))}" for name, parameter in module.named_parameters(recurse=False)
    )
