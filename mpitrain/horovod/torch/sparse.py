"""Allreduce of sparse tensors."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..process_sets import ProcessSet, global_process_set
from ..request import ReduceOp
from .allgather import allgather_async
from .submission import Average, Sum, synchronize


def sparse_allreduce_async(
    tensor: Tensor, name: str, op: ReduceOp | int, process_set: ProcessSet = global_process_set
) -> Callable[[], Tensor]:
    """Add sparse tensors (COO) of all ranks; return a function that waits and returns the sum or average.

    The ranks may have different elements, and different numbers of them.
    """
    if op not in (Average, Sum):
        raise ValueError(f"a sparse allreduce supports Sum and Average only, not {ReduceOp(op).name}")
    indices = allgather_async(tensor._indices().t().contiguous(), f"{name}.indices", process_set)
    values = allgather_async(tensor._values(), f"{name}.values", process_set)

    def result() -> Tensor:
        all_values, all_indices = synchronize(values), synchronize(indices)
        if op == Average:
            all_values = all_values / process_set.size()
        return torch.sparse_coo_tensor(all_indices.t(), all_values, tensor.shape, check_invariants=False)

    return result
