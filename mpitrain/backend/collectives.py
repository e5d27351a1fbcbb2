"""Collective operations on contiguous CPU tensors: shared memory within a node, MPI between nodes.

An operation is a generator. It yields a phase of the node's barrier or an MPI request when it must wait, and is resumed
when that phase or request is complete. The calling thread can therefore start an operation, and another thread can
finish it. Every operation is collective over the group, and each rank publishes at least one phase of its node's
barrier. An operation takes lists of tensors, first those that it writes, then those that it only reads.

Values are added in the order of the ranks on a node, then in the order of the nodes, for all sizes. Sums therefore do
not depend on timing or on the MPI library, and are bit-identical on all ranks.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence

import torch
from torch import Tensor

from ..comm.mpi import MPI
from ..core.ranges import aligned_range
from .internode import MESSAGE_BYTES, Condition, Steps, messages_of, reduce_chunk
from .members import Members
from .reductions import Reduction

_DIVIDED_BYTES = 32 << 10  # each rank reduces smaller blocks completely; larger blocks are divided among the ranks


class Collectives:
    """The operations of one process group."""

    def __init__(self, members: Members) -> None:
        self._members, self._staging = members, members.staging
        self._rank, self._size = members.staging.rank, members.staging.size
        self._alone, self._one_node = self._size == 1, members.on_one_node
        self._internode = members.hierarchy.internode

    def barrier(self) -> Steps:
        """Wait for all ranks."""
        yield self._staging.publish()
        if not self._one_node:
            if self._rank == 0:
                yield self._first_ranks.Ibarrier()
            yield self._staging.publish()

    @property
    def _first_ranks(self) -> MPI.Intracomm:
        """The first ranks of all nodes; only these ranks may read this."""
        assert self._internode is not None
        return self._internode

    # Within a node.

    def _block(self, tensor: Tensor, parts: int = 1) -> int:
        return max(1, self._staging.block_bytes // tensor.element_size() // parts)

    def _node_all_reduce(
        self, flats: Sequence[Tensor], reduction: Reduction, receives: bool = True, is_staged: bool = False
    ) -> Steps:
        """Reduce ``flats``, as if they were one tensor, over the node's ranks, in place.

        Args:
            flats: Tensors of one type, each of shape (n,), with at least one element in all.
            receives: Whether this rank needs the result.
            is_staged: Whether the first block has been written and published.
        """
        if self._alone:
            return
        for pieces in _blocks(flats, self._block(flats[0])):
            if not is_staged:
                self._write_block(pieces)
                yield self._staging.publish()
            yield from self._reduce_block(pieces, reduction, receives)
            is_staged = False

    def _write_block(self, pieces: Sequence[Tensor]) -> None:
        m = sum(piece.numel() for piece in pieces)
        own = self._staging.next_buffers(pieces[0].dtype)[self._rank][:m]
        if len(pieces) == 1:
            own.copy_(pieces[0])
        else:
            torch.cat(list(pieces), out=own)

    def _reduce_block(self, pieces: Sequence[Tensor], reduction: Reduction, receives: bool) -> Steps:
        """Reduce tensors that fit into a block together; all ranks have published the block.

        If all ranks are on this node, the reduction is finished here, while the block is in the cache.
        """
        staging, rank, size = self._staging, self._rank, self._size
        m = sum(piece.numel() for piece in pieces)
        buffers = [buffer[:m] for buffer in staging.buffers(pieces[0].dtype)]
        if size == 2 and reduction.is_sum:
            if receives:
                self._add_block(pieces, buffers[1 - rank], reduction)
            return
        own = buffers[rank]
        result = pieces[0] if len(pieces) == 1 else torch.empty_like(own)
        if size == 2 or m * own.element_size() < _DIVIDED_BYTES:
            if receives:
                reduction(buffers, result)
                self._finish_on_node(reduction, result)
        else:
            start, stop = aligned_range(0, m, rank, size)
            if stop > start:
                reduction([buffer[start:stop] for buffer in buffers], result[start:stop])
                self._finish_on_node(reduction, result[start:stop])
                own[start:stop].copy_(result[start:stop])
            yield staging.publish()
            for other in range(size) if receives else ():
                start, stop = aligned_range(0, m, other, size)
                if other != rank and stop > start:
                    result[start:stop].copy_(buffers[other][start:stop])
        if receives and len(pieces) > 1:
            torch._foreach_copy_(list(pieces), list(result.split([piece.numel() for piece in pieces])))

    def _add_block(self, pieces: Sequence[Tensor], other: Tensor, reduction: Reduction) -> None:
        """Add the other rank's block to this rank's tensors, on a node with two ranks. The order does not change bits.

        This takes half the time of adding both buffers, because this rank does not read its own buffer, which it writes
        next.
        """
        start = 0
        for piece in pieces:
            stop = start + piece.numel()
            reduction([piece, other[start:stop]], piece)
            self._finish_on_node(reduction, piece)
            start = stop

    def _finish_on_node(self, reduction: Reduction, result: Tensor) -> None:
        if self._one_node:
            reduction.finish(result, self._members.size)

    def _node_broadcast(self, flat: Tensor, root: int) -> Steps:
        """Copy ``flat``, shape (n,), from the node's rank ``root`` to its other ranks."""
        sent, received = ([(0, flat)], []) if self._rank == root else ([], [(root, 0, flat)])
        if not self._alone:
            yield from self._pass(sent, received, flat, flat.numel())

    def _pass(
        self,
        sent: Sequence[tuple[int, Tensor]],
        received: Sequence[tuple[int, int, Tensor]],
        like: Tensor,
        n: int,
        places: int = 1,
    ) -> Steps:
        """Pass tensors of the type of ``like`` to other ranks of the node, block by block.

        Args:
            sent: This rank's tensors, each with its place in this rank's buffer.
            received: Tensors to fill, each with the index of the sender, and the place in the sender's buffer.
            n: The number of elements of the longest tensor of any rank.
            places: The number of places into which each buffer is divided.
        """
        block = self._block(like, places)
        for lo in range(0, n, block):
            buffers = self._staging.next_buffers(like.dtype)
            for place, tensor in sent:
                part = tensor[lo : lo + block]
                buffers[self._rank][place * block : place * block + part.numel()].copy_(part)
            yield self._staging.publish()
            for rank, place, tensor in received:
                part = tensor[lo : lo + block]
                part.copy_(buffers[rank][place * block : place * block + part.numel()])

    # The operations.

    def stage(self, flats: Sequence[Tensor]) -> bool:
        """Write the first block for a later ``all_reduce``; return whether a block was written. Local.

        The block is published with this rank's next phase. Even if no operation follows, all ranks must call this or
        ``skip``: blocks alternate between two buffers.
        """
        if not self._one_node or self._alone or not any(map(Tensor.numel, flats)):
            return False
        self._write_block(next(_blocks(flats, self._block(flats[0]))))
        return True

    def skip(self) -> None:
        """Write nothing in place of ``stage``. Local."""
        self._staging.next_buffers(torch.uint8)

    def all_reduce(self, flats: Sequence[Tensor], reduction: Reduction, is_staged: bool = False) -> Steps:
        """Reduce tensors of one type, each of shape (n,), over all ranks, in place and with few exchanges.

        Args:
            is_staged: Whether ``stage`` has written the first block, which all ranks have published since.
        """
        is_empty = not flats[0].numel() and not any(map(Tensor.numel, flats))
        if is_empty or self._alone:
            yield self._staging.publish()
        if is_empty:
            return
        if self._one_node:
            yield from self._node_all_reduce(flats, reduction, is_staged=is_staged)
            return
        flat = flats[0] if len(flats) == 1 else torch.cat(list(flats))
        yield from self._node_all_reduce([flat], reduction)
        yield from self._reduce_between_nodes(flat, reduction)
        reduction.finish(flat, self._members.size)
        if len(flats) > 1:
            torch._foreach_copy_(list(flats), list(flat.split([flat.numel() for flat in flats])))

    def all_reduce_sparse(self, tensor: Tensor, reduction: Reduction) -> Steps:
        """Add a sparse tensor in COO format over all ranks, in place.

        Every rank gathers the indices and values of all ranks, and adds them in the order of the ranks.

        Args:
            tensor: The sparse tensor; ranks may have different non-zero elements, and different numbers of them.
        """
        own = tensor.detach().coalesce()
        indices, values = yield from self.all_gather_rows([own.indices().t().contiguous(), own.values()])
        total = torch.sparse_coo_tensor(indices.t(), values, own.shape).coalesce()
        reduction.finish(total.values(), self._members.size)
        with torch.no_grad():  # copy to ``tensor`` itself: ``tensor.detach()`` has its own indices
            tensor.copy_(total)

    def reduce(self, flats: Sequence[Tensor], reduction: Reduction, root: int) -> Steps:
        """Reduce a tensor of shape (n,), in place on ``root``; on other ranks, it does not change."""
        (flat,) = flats
        is_root = self._members.rank == root
        if self._one_node and not self._alone and flat.numel():
            divided = self._size > 2 and flat.numel() * flat.element_size() >= _DIVIDED_BYTES
            target = flat if is_root or not divided else flat.clone()
            yield from self._node_all_reduce([target], reduction, receives=is_root)
            return
        yield from self.all_reduce([flat if is_root else flat.clone()], reduction)

    def broadcast(self, flats: Sequence[Tensor], root: int) -> Steps:
        """Copy a tensor of shape (n,) from ``root`` to all ranks."""
        (flat,), members = flats, self._members
        on_root_node = members.node == members.node_of[root]
        if self._alone or not self._one_node or not flat.numel():
            yield self._staging.publish()
        if on_root_node:
            yield from self._node_broadcast(flat, members.index_of[root])
        if self._one_node:
            return
        if self._rank == 0:
            for message in messages_of(flat):
                yield self._first_ranks.Ibcast(message, root=members.node_of[root])
        if not on_root_node:
            yield from self._node_broadcast(flat, 0)

    def all_gather(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Steps:
        """Copy each rank's input, shape (n,), to all ranks' ``outputs[rank]``; these may be parts of a tensor."""
        (flat,), outputs = inputs, self._parts(outputs)
        yield from self._exchange([flat] * len(outputs), outputs, flat.numel(), is_same=True)

    def all_gather_rows(self, tensors: Sequence[Tensor]) -> Generator[Condition, None, list[Tensor]]:
        """Return each tensor joined with those of the other ranks along the first dimension, which may differ."""
        size, joined = self._members.size, list[Tensor]()
        rows = torch.tensor([len(tensor) for tensor in tensors], device="cpu")
        counts = [torch.empty_like(rows) for _ in range(size)]
        yield from self.all_gather(counts, [rows])
        for tensor, of_ranks in zip(tensors, torch.stack(counts, 1).tolist(), strict=True):
            gathered = tensor.new_empty((size, max(of_ranks), *tensor.shape[1:]))
            yield from self.all_gather([gathered.view(-1)], [padded(tensor, gathered[0])])
            if min(of_ranks) == max(of_ranks) and gathered.numel():
                joined.append(gathered.view(-1, *tensor.shape[1:]))
            else:
                joined.append(torch.cat([gathered[rank, :count] for rank, count in enumerate(of_ranks)]))
        return joined

    def _parts(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return one tensor per rank: these tensors, or the parts of a single tensor."""
        whole, size = tensors[0], self._members.size
        if len(tensors) == size:
            return tensors
        return whole.view(size, -1).unbind() if whole.numel() else [whole] * size

    def gather(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], root: int) -> Steps:
        """Copy each rank's input, shape (n,), to ``outputs[rank]`` of ``root``; ``outputs`` is empty elsewhere."""
        (flat,) = inputs
        empty = flat[:0]
        sent = [flat if rank == root else empty for rank in range(self._members.size)]
        yield from self._exchange(sent, list(outputs) or [empty] * len(sent), flat.numel(), is_same=True)

    def scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], root: int) -> Steps:
        """Copy ``inputs[rank]`` of ``root`` to each rank's output, shape (n,); ``inputs`` is empty elsewhere."""
        (out,) = outputs
        empty = out[:0]
        received = [out if rank == root else empty for rank in range(self._members.size)]
        yield from self._exchange(list(inputs) or [empty] * len(received), received, out.numel())

    def reduce_scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], reduction: Reduction) -> Steps:
        """Set the output, shape (n,), to the reduction of all ranks' ``inputs[rank]``, or parts of a single input."""
        (out,), inputs, rank, size = outputs, self._parts(inputs), self._rank, self._members.size
        if not self._one_node:
            received = out.new_empty((size, out.numel()))
            yield from self._exchange_by_mpi(inputs, list(received.unbind()))
            reduction(self._by_node(received), out)
            reduction.finish(out, size)
            return
        if self._alone or not out.numel():
            yield self._staging.publish()
            out.copy_(inputs[0])
            return
        block = self._block(out, size)
        for lo in range(0, out.numel(), block):
            part = out[lo : lo + block]
            m = part.numel()
            buffers = self._staging.next_buffers(out.dtype)
            for other, sent in enumerate(inputs):
                buffers[rank][other * block : other * block + m].copy_(sent[lo : lo + m])
            yield self._staging.publish()
            reduction([buffer[rank * block : rank * block + m] for buffer in buffers], part)
        reduction.finish(out, size)

    def _by_node(self, received: Tensor) -> list[Tensor]:
        """Return the rows of a tensor with one row per rank, in the order of the nodes."""
        members = self._members
        return [received[rank] for node in range(members.hierarchy.n_nodes) for rank in members.ranks_of_node(node)]

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], equal: bool) -> Steps:
        """Copy ``inputs[j]`` of each rank i to ``outputs[i]`` of rank j.

        Args:
            equal: Whether all tensors on all ranks have the same size; otherwise the ranks compare the sizes first.

        Raises:
            ValueError: A rank sends another number of elements than this rank expects.
        """
        longest = outputs[0].numel()
        if not equal:
            sizes = torch.tensor([sent.numel() for sent in inputs], dtype=torch.int64, device="cpu")
            all_sizes = [torch.empty_like(sizes) for _ in inputs]
            yield from self.all_gather(all_sizes, [sizes])
            self._compare_sizes(outputs, all_sizes)
            longest = max(int(row.max()) for row in all_sizes)
        yield from self._exchange(inputs, outputs, longest)

    def _exchange(
        self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], longest: int, is_same: bool = False
    ) -> Steps:
        """Copy ``inputs[j]`` of each rank i to ``outputs[i]`` of rank j; some of them may be empty.

        Args:
            longest: The number of elements of the longest tensor of any rank.
            is_same: Whether every rank sends a single tensor, to one rank or to all, so that it is written only once.
        """
        if not self._one_node:
            yield from self._exchange_by_mpi(inputs, outputs)
            return
        rank = self._rank
        if outputs[rank].data_ptr() != inputs[rank].data_ptr():
            outputs[rank].copy_(inputs[rank])
        if self._alone or not longest:
            yield self._staging.publish()
            return
        sent = [(other, tensor) for other, tensor in enumerate(inputs) if other != rank and tensor.numel()]
        received = [(other, rank, tensor) for other, tensor in enumerate(outputs) if other != rank and tensor.numel()]
        if is_same:
            sent, received = [(0, tensor) for _, tensor in sent[:1]], [(other, 0, out) for other, _, out in received]
        yield from self._pass(sent, received, outputs[0], longest, 1 if is_same else self._size)

    def _compare_sizes(self, outputs: Sequence[Tensor], all_sizes: Sequence[Tensor]) -> None:
        for rank, (output, sizes) in enumerate(zip(outputs, all_sizes, strict=True)):
            sent = int(sizes[self._members.rank])
            if sent != output.numel():
                raise ValueError(
                    f"rank {rank} sends {sent} elements to rank {self._members.rank}, which expects {output.numel()}; "
                    "output_split_sizes must be the input_split_sizes of the other ranks"
                )

    # Between nodes.

    def _reduce_between_nodes(self, flat: Tensor, reduction: Reduction) -> Steps:
        """Reduce ``flat``, which is equal on the ranks of a node, over all nodes: each rank exchanges a chunk."""
        hierarchy = self._members.hierarchy
        chunks = [aligned_range(0, flat.numel(), index, hierarchy.n_chunks) for index in range(hierarchy.n_chunks)]
        if self._internode is not None:
            lo, hi = chunks[self._rank]
            step = MESSAGE_BYTES // flat.element_size()
            for start in range(lo, hi, step):
                yield from reduce_chunk(flat[start : min(start + step, hi)], reduction, self._internode)
        for index, (lo, hi) in enumerate(chunks):
            if hi > lo:
                yield from self._node_broadcast(flat[lo:hi], index)

    def _exchange_by_mpi(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Steps:
        """Copy ``inputs[j]`` of each rank i to ``outputs[i]`` of rank j, in messages."""
        yield self._staging.publish()
        comm, rank = self._members.comm, self._members.rank
        outputs[rank].copy_(inputs[rank])
        others = [(rank + shift) % comm.size for shift in range(1, comm.size)]
        requests = [
            comm.Irecv(message, other) for other in reversed(others) for message in messages_of(outputs[other])
        ] + [comm.Isend(message, other) for other in others for message in messages_of(inputs[other])]
        yield from requests


def padded(part: Tensor, whole: Tensor) -> Tensor:
    """Return ``part`` as a contiguous tensor of shape (n,) with as many elements as ``whole``."""
    if part.numel() == whole.numel():
        return part.reshape(-1)
    result = whole.new_zeros(whole.numel())
    result[: part.numel()].copy_(part.reshape(-1))
    return result


def _blocks(flats: Sequence[Tensor], block: int) -> Iterator[list[Tensor]]:
    """Yield the elements of tensors in blocks of ``block`` elements; a block is a list of parts of tensors."""
    pieces: list[Tensor] = []
    room = block
    for flat in flats:
        start, n = 0, flat.numel()
        while n - start >= room:
            pieces.append(flat[start : start + room] if n > room else flat)
            yield pieces
            start, pieces, room = start + room, [], block
        if start < n:
            pieces.append(flat[start:] if start else flat)
            room -= n - start
    if pieces:
        yield pieces
