"""The base class of operations and messages, which ``torch.distributed`` returns as handles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.distributed import Work


class TensorWork(Work):  # type: ignore[misc]
    """Work that returns tensors. Local.

    Attributes:
        outputs: The tensors.
        done: Whether it has ended.
        error: Why it failed.
        future: The future that the caller has asked for.
    """

    def __init__(self, outputs: list[Tensor], end_process: Callable[[Exception], None]) -> None:
        super().__init__()
        self.outputs, self.done = outputs, False
        self.error: Exception | None = None
        self.future: Any = None
        self._end_process = end_process

    def complete_future(self) -> None:
        """Give the future its value. After an error the process ends: DDP's reducer cannot handle one in a future."""
        if self.error is not None:
            self._end_process(self.error)
        self.future.set_result(self.outputs)

    def is_success(self) -> bool:
        """Return whether the operation or message has ended without an error."""
        return self.done and self.error is None

    def exception(self) -> Exception | None:
        """Return the error; None if there is none."""
        return self.error

    def result(self) -> list[Tensor]:
        """Return the tensors."""
        return self.outputs

    def synchronize(self) -> None:
        """Do the same as ``wait``."""
        self.wait()
