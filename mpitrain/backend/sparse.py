"""Sums of sparse tensors, such as gradients of embeddings."""

from __future__ import annotations

import torch
from torch import Tensor

from .collectives import Collectives
from .internode import Steps
from .reductions import Reduction


def all_reduce(collectives: Collectives, tensor: Tensor, reduction: Reduction, size: int) -> Steps:
    """Sum a sparse tensor in COO format over all ranks, in place. Collective over the group.

    Every rank gathers the indices and values of all ranks, and adds them in the order of the ranks.

    Args:
        tensor: The sparse tensor; ranks may have different non-zero elements, and different numbers of them.
        size: Number of ranks.
    """
    own = tensor.detach().coalesce()
    counts = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in range(size)]
    yield from collectives.all_gather(counts, torch.tensor([own._nnz()], device="cpu"))
    largest = max(int(count) for count in counts)
    indices = torch.zeros((largest, own.sparse_dim()), dtype=torch.int64, device="cpu")
    values = own.values().new_zeros((largest, *own.values().shape[1:]))
    indices[: own._nnz()], values[: own._nnz()] = own.indices().t(), own.values()
    all_indices = [torch.empty(indices.numel(), dtype=torch.int64, device="cpu") for _ in range(size)]
    all_values = [values.new_empty(values.numel()) for _ in range(size)]
    yield from collectives.all_gather(all_indices, indices.view(-1))
    yield from collectives.all_gather(all_values, values.view(-1))
    rows = [part.view_as(indices)[: int(count)] for part, count in zip(all_indices, counts, strict=True)]
    parts = [part.view_as(values)[: int(count)] for part, count in zip(all_values, counts, strict=True)]
    total = torch.sparse_coo_tensor(torch.cat(rows).t(), torch.cat(parts), own.shape).coalesce()
    reduction.finish(total.values(), size)
    with torch.no_grad():  # copy to ``tensor`` itself: ``tensor.detach()`` has its own indices
        tensor.copy_(total)
