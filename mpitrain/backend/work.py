"""The base class of operations and messages, which ``torch.distributed`` returns as handles."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor
from torch.distributed import Work
from torch.futures import Future

from .process_end import end_process


class TensorWork(Work):  # type: ignore[misc]
    """Work that returns tensors. Local.

    Args:
        lock: Held while the work ends.

    Attributes:
        outputs: The tensors.
        done: Whether it has ended.
        error: Why it failed.
    """

    def __init__(self, outputs: list[Tensor], lock: AbstractContextManager[Any]) -> None:
        super().__init__()
        self.outputs, self.done = outputs, False
        self.error: Exception | None = None
        self._future: Any = None
        self._lock = lock

    def end(self, error: Exception | None = None) -> None:
        """Mark the work as complete or failed. The caller holds the lock."""
        self.error, self.done = error, True
        if self._future is not None:
            self._complete_future()

    def get_future(self) -> Any:
        """Return a future of the tensors. If the work fails, the process ends with the reason.

        A future with an exception would make the reducer of DistributedDataParallel dereference a null pointer.
        """
        with self._lock:
            if self._future is None:
                devices: list[Any] = list({tensor.device for tensor in self.outputs if tensor.is_cuda})
                self._future = Future(devices=devices) if devices else Future()
                if self.done:
                    self._complete_future()
                else:
                    self._end_later()
        return self._future

    def _end_later(self) -> None:
        """Let the work end even if no thread waits for it; called when the future is created."""

    def _complete_future(self) -> None:
        if self.error is not None:
            end_process(self.error)
        self._future.set_result(self.outputs)

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
