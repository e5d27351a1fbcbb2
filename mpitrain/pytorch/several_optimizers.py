"""Several optimizers of torch for one model, each with its own parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from ..core.extra_state import ExtraState
from ..core.layout import Array
from ..errors import JobError
from ..optim.whole_tensors import WholeTensorOptimizer
from .live_optimizer import LiveOptimizer
from .names import parameters_of
from .whole_tensors import TorchTensors


@dataclass(frozen=True)
class SeveralOptimizers(WholeTensorOptimizer):
    """Updates each tensor with the optimizer that has it.

    Attributes:
        members: The optimizers; no two have the same parameter.
    """

    members: Sequence[TorchTensors] = field(default=(), kw_only=True)

    @property
    def name(self) -> str:
        return ", ".join(member.name for member in self.members)

    def update_tensors(self, grads: Mapping[str, Array]) -> None:
        for member in self.members:
            member.update_tensors(grads)

    def can_divide(self) -> bool:
        return all(member.can_divide() for member in self.members)

    def begin(self, names: Sequence[str], state: ExtraState) -> None:
        for member in self.members:
            others = {name for other in self.members if other is not member for name in state if other.stores(name)}
            own = {name: values for name, values in state.items() if name not in others}
            member.begin(names, own)

    def tensor_state(self) -> ExtraState:
        return {name: values for member in self.members for name, values in member.tensor_state().items()}

    def arrays_to_average(self) -> list[Array]:
        return [array for member in self.members for array in member.arrays_to_average()]


def as_one(optimizers: Sequence[LiveOptimizer], model: nn.Module) -> SeveralOptimizers:
    """Return the rule that updates with several optimizers.

    Raises:
        JobError: Two optimizers have the same parameter.
    """
    members = [optimizer.rule for optimizer in optimizers if isinstance(optimizer.rule, TorchTensors)]
    for name, _ in parameters_of(model):
        owners = [member.name for member in members if name in member.parameters]
        if len(owners) > 1:
            raise JobError(
                f"the parameter {name} is in the optimizers {owners[0]} and {owners[1]}: must be in only one"
            )
    return SeveralOptimizers(members[0].learning_rate, members=members)
