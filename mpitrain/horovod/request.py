"""Requests for collective operations: what the ranks agree on, and the handle of a rank's part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

Shape = tuple[int, ...]

_ANY_ROWS = {"allgather", "alltoall"}  # operations in which the first dimension may differ between ranks


class ReduceOp(IntEnum):
    """Reductions, with Horovod's numbers."""

    Average = 0
    Sum = 1
    Adasum = 2
    Min = 3
    Max = 4
    Product = 5


class Request(NamedTuple):
    """A collective operation. Requests must be equal on all ranks, which match them by name and kind.

    Attributes:
        kind: The kind of operation, such as ``allreduce``.
        name: The program's name of the operation; empty if it has none.
        dtype: Data type of the tensors; None without tensors.
        shapes: Shapes of the tensors, without the first dimension if it may differ between ranks.
        op: The reduction.
        root: The sender of a broadcast.
        scales: Factors before and after the reduction.
    """

    kind: str
    name: str = ""
    dtype: torch.dtype | None = None
    shapes: tuple[Shape, ...] = ()
    op: ReduceOp | None = None
    root: int | None = None
    scales: tuple[float, float] = (1.0, 1.0)

    @property
    def text(self) -> str:
        """All properties that must agree, in one line."""
        parts = [self.kind]
        if self.op is not None:
            parts.append(self.op.name)
        if self.root is not None:
            parts.append(f"root {self.root}")
        if self.dtype is not None:
            parts.append(str(self.dtype).removeprefix("torch."))
        parts += map(self._shape_text, self.shapes)
        if self.scales != (1.0, 1.0):
            parts.append(f"prescale {self.scales[0]:g} postscale {self.scales[1]:g}")
        return " ".join(parts)

    def _shape_text(self, shape: Shape) -> str:
        sizes = ["any", *map(str, shape)] if self.kind in _ANY_ROWS else list(map(str, shape))
        return f"({', '.join(sizes)}{',' * (len(sizes) == 1)})"


class Handle:
    """A rank's part of an operation. Any thread may read it.

    Args:
        request: The properties that ranks must agree on.
        tensors: Contiguous CPU tensors. The inputs of allreduce and broadcast have the shape (n,), and are also
            outputs.
        finish: Converts the result to the value that the program gets; the thread that synchronizes calls it.
        splits: For an alltoall, the rows for each rank.

    Attributes:
        key: The key by which ranks match the operation: kind, name, and a number that distinguishes requests without a
            name; it is 0 for requests with a name.
        done: Whether the operation has ended.
        error: Why the operation failed; None if it did not.
        result: The output tensors, or a number.
        submitted: The time of submission, on the clock of ``perf_counter``.
    """

    __slots__ = ("done", "error", "finish", "key", "request", "result", "splits", "submitted", "tensors")

    def __init__(
        self,
        request: Request,
        tensors: Sequence[Tensor] = (),
        finish: Callable[[Any], Any] | None = None,
        splits: Tensor | None = None,
    ) -> None:
        self.request, self.tensors, self.splits = request, tensors, splits
        self.finish = finish
        self.key = (request.kind, request.name, 0)
        self.done = False
        self.error: Exception | None = None
        self.result: Any = None
        self.submitted = perf_counter()

    def end(self, result: Any, error: Exception | None = None) -> None:
        """Mark the operation as complete or failed."""
        self.result, self.error = result, error
        self.done = True


def title(kind: str, name: str, number: int) -> str:
    """Return the description of an operation in messages."""
    return f"{kind} {name!r}" if name else f"{kind} without a name (number {number})"
