"""The parameters of a PyTorch module on one device, in views of the flat vectors; finding changes by scripts."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack

from ..core.layout import Array
from ..core.ranges import Bucket
from ..core.training_state import TrainingState
from ..errors import JobError
from ..plan.plan import Plan
from ..pytorch.bfloat16 import Bfloat16Copies, is_copied
from ..pytorch.gradients import Gradients
from ..pytorch.linear import write_gradients
from ..pytorch.names import parameters_of
from .torch_device import TorchDevice

_SAMPLED = 256  # number of elements that are sampled to detect changes of the parameters


class TorchParams:
    """The parameters of a module and their gradients: views of the bound vectors, or copies in bfloat16.

    Args:
        state: Its ``frozen`` is set to the parameters that do not require a gradient.
        announces: Whether buckets are announced during the backward pass; this takes a hook for each parameter.

    Attributes:
        names, tensors: The parameters.
        copies: Those parameters that are copies.
        gradients: Their gradients.
        flat: The bound parameters, shape (layout.size,).
        data_pointers: The addresses of the parameters in this vector.
    """

    def __init__(
        self, module: nn.Module, plan: Plan, device: TorchDevice, state: TrainingState, announces: bool
    ) -> None:
        self.names = [name for name, _ in parameters_of(module)]
        self.tensors = [param for _, param in parameters_of(module)]
        self.copies = Bfloat16Copies(self.names, self.tensors)
        buckets = plan.buckets if announces else [Bucket(0, plan.layout.size)]
        self.gradients = Gradients(self.names, self.tensors, plan.layout, buckets, not plan.shows_grads)
        if device.torch_device.type == "cpu":  # on a GPU a copy takes less time than a call of Python
            write_gradients(module, self.tensors, self.gradients)
        self._layout, self._training_state = plan.layout, state
        self._frozen: list[bool] = []  # the values in the training state

    def views(self, vector: Array) -> dict[str, Tensor]:
        """Return the named views of a vector as tensors that share its memory."""
        return {name: from_dlpack(view) for name, view in self._layout.views(vector).items()}

    def bind(self, flat: Array, values: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> None:
        """Use the named views of the vector ``flat``, and of a vector for the gradient, from now on."""
        for name, param in zip(self.names, self.tensors, strict=True):
            if not is_copied(param):
                param.data = values[name]
        self.copies.bind(values)
        self.flat, self.data_pointers = flat, [param.data_ptr() for param in self.tensors]
        self.gradients.bind([gradients[name] for name in self.names])

    def note_frozen(self) -> None:
        """See ``SteppedModel``."""
        frozen = [not param.requires_grad for param in self.tensors]
        if frozen != self._frozen:
            self._frozen = frozen
            self._training_state.frozen[: len(frozen)] = frozen  # the first entries of the layout


class ParamsGuard:
    """Detects that a script has changed parameters directly, by the values of some elements."""

    def __init__(self, params: TorchParams, plan: Plan) -> None:
        self._params, self._entries, self._recorded = params, plan.layout.entries, b""
        starts = [entry.start for entry in plan.layout.entries if entry.kind == "param"]
        self._sample = np.unique([*np.linspace(0, plan.layout.n_trained - 1, _SAMPLED).astype(np.int64), *starts])

    def record_params(self) -> None:
        """See ``SteppedModel``."""
        self._recorded = self._params.flat[self._sample].tobytes()
        self._params.copies.record()

    def check_params(self) -> None:
        """See ``SteppedModel``."""
        values = self._params.flat[self._sample]
        name = self._params.copies.changed()
        if self._recorded != values.tobytes():
            before = np.frombuffer(self._recorded, values.dtype)
            index = int(self._sample[np.flatnonzero(before != values)[0]])
            name = next(entry.name for entry in self._entries if entry.start <= index < entry.stop)
        if name is not None:
            raise JobError(
                f"the loop has changed the parameter {name} directly, but the node's ranks share it, or "
                f"keep it in float32: use the optimizer, or "
                f"pass a function that changes the parameter to trainer.change_parameters"
            )

    def check_data_pointers(self) -> None:
        """See ``SteppedModel``."""
        params = self._params
        for name, param, pointer in zip(params.names, params.tensors, params.data_pointers, strict=True):
            if param.data_ptr() != pointer:
                raise JobError(
                    f"the loop has replaced the data of the parameter {name}, so that updates no longer reach it: "
                    "change it in place, in a function that is passed to trainer.change_parameters"
                )
