"""The process group: PyTorch's interface, in terms of operations on contiguous CPU tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..comm.mpi import MPI
from .collectives import Collectives
from .host_tensors import check_parts, check_sizes, copy_back, split_rows, to_host
from .internode import Steps, messages_of
from .members import join
from .operations import Operation, OperationQueue
from .point_to_point import Message
from .reductions import Reduction, reduction_of
from .staging import TEXT_BYTES
from .waiting import Waiting

_NO_TIMEOUT = timedelta(0)
_LEAVE_S = 10.0  # maximum time for the other ranks to destroy the group

# Releases after 2.13 have a base class for backends in Python.
_Base: Any = getattr(dist, "BackendBase", dist.ProcessGroup)


def create(options: Any, backend_options: Any = None) -> MpiProcessGroup:
    """Create a process group: the function that is registered with PyTorch. Collective over the group's ranks."""
    return MpiProcessGroup(
        options.store, options.group_rank, options.group_size, options.timeout, str(options.group_id)
    )


class MpiProcessGroup(_Base):  # type: ignore[misc]
    """A process group of MPI ranks.

    Methods have the names and arguments of PyTorch's ``ProcessGroup``, and are collective over the group unless noted.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, name: str) -> None:
        super().__init__(rank, size)
        self._store = store
        self._timeout_s = timeout.total_seconds()
        self._members = join(store, rank, size, name, timeout)
        self._collectives = Collectives(self._members)
        self._waiting = Waiting(self._members, store)
        self._queue = OperationQueue(f"mpitrain {name}", self._timeout_s, self._waiting.wait, self._waiting.poll)
        self._calls: dict[object, tuple[str, bytes, int]] = {}
        self._left = False

    # Properties of the group.

    def getBackendName(self) -> str:  # noqa: N802
        return "mpitrain"

    def name(self) -> str:
        return "mpitrain"

    @property
    def _device_types(self) -> list[torch.device]:
        """The devices whose tensors the group accepts. PyTorch's checkpoints read this, and prefer the first."""
        return [torch.device("cpu"), *([torch.device("cuda")] if torch.cuda.is_available() else [])]

    @property
    def group_name(self) -> str:
        """The name by which PyTorch registers the group."""
        return self._members.name

    def getGroupName(self) -> str:  # noqa: N802
        return self._members.name

    def get_group_store(self) -> Any:
        """Return the store of the group. Local."""
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of later operations. Local."""
        self._queue.timeout_s = self._timeout_s = timeout.total_seconds()

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: operations are counted from 0."""

    def _get_sequence_number_for_group(self) -> int:
        return self._waiting.count

    def shutdown(self) -> None:
        """Free the group. If other ranks do not, its memory is freed when the process ends."""
        if self._left:
            return
        self._left = True
        self._queue.close()
        if self._queue.failed is None and self._agree_to_leave():
            self._members.free()
        else:
            self._members.staging.mark_ended()

    def _agree_to_leave(self) -> bool:
        """Return whether all ranks destroy the group; the same on all ranks.

        Freeing is collective, so no rank may free alone. A rank whose first barrier times out does not enter the
        second. Then no rank completes the second barrier, which needs all ranks.
        """
        for timeout_s in (_LEAVE_S, self._timeout_s):
            self._queue.timeout_s = timeout_s
            try:
                self._operation("destroy_process_group", (), [], self._collectives.barrier()).wait()
            except (RuntimeError, ValueError):  # a ValueError if the group can never be used
                return False
        return True

    abort = shutdown

    # Performing operations.

    def _operation(
        self, name: str, agreed: tuple[object, ...], outputs: list[Tensor], steps: Steps, options: Any = None
    ) -> Operation:
        """Submit an operation.

        Args:
            agreed: The properties that must be the same on all ranks: shapes, data types, reductions, roots.
        """
        if not self._calls:
            self._check_devices()
        key = (name, *agreed)
        call = self._calls.get(key)
        if call is None:
            call = self._calls[key] = _describe(name, agreed)
        text, encoded, signature = call
        operation = Operation(self._queue, text, outputs)
        operation.steps = self._waiting.signed(operation, encoded, signature, steps)
        on_gpu = bool(outputs) and not outputs[0].is_cpu  # copies are ordered with the calling thread's CUDA stream
        blocking = on_gpu or (options is not None and not getattr(options, "asyncOp", True))
        if options is not None and options.timeout > _NO_TIMEOUT:
            operation.timeout_s = options.timeout.total_seconds()
        return self._queue.submit(operation, blocking)

    def _perform(
        self,
        name: str,
        agreed: tuple[object, ...],
        calls: Sequence[tuple[Sequence[Tensor], Sequence[Tensor]]],
        options: Any,
        collective: Callable[..., Steps],
        *arguments: object,
    ) -> Operation:
        """Submit an operation on tensors of any layout and device.

        Args:
            calls: For each call of ``collective`` the tensors that it writes, and those that it reads.
            collective: Takes these tensors as contiguous CPU tensors of shape (n,), and then ``arguments``.
        """

        def steps() -> Steps:
            for outputs, inputs in calls:
                flats = [to_host(tensor, reads=False) for tensor in outputs]
                yield from collective(flats, [to_host(tensor) for tensor in inputs], *arguments)
                for tensor, flat in zip(outputs, flats, strict=True):
                    copy_back(tensor, flat)

        return self._operation(name, agreed, [tensor for outputs, _ in calls for tensor in outputs], steps(), options)

    def _perform_in_place(
        self,
        name: str,
        agreed: tuple[object, ...],
        tensors: list[Tensor],
        options: Any,
        collective: Callable[..., Steps],
        *arguments: object,
    ) -> Operation:
        """Submit an operation that works in place: a call of ``collective`` for each tensor."""

        def steps() -> Steps:
            for tensor in tensors:
                flat = to_host(tensor)
                yield from collective([flat], *arguments)
                copy_back(tensor, flat)

        return self._operation(name, agreed, tensors, steps(), options)

    def _root(self, name: str, options: Any) -> int:
        """Return the root of an operation.

        Raises:
            ValueError: The root is not a rank of the group.
        """
        root = 0 if options is None else int(options.rootRank)
        if not 0 <= root < self.size():
            raise ValueError(f"{name}: there is no rank {root}; the ranks of the group are 0 to {self.size() - 1}")
        return root

    def _check_devices(self) -> None:
        """Refuse groups with several backends: PyTorch lets a process group in Python replace them all.

        Raises:
            ValueError: The group has several backends, such as for "cpu:mpitrain,cuda:nccl".
        """
        config = dist.distributed_c10d._world.pg_backend_config.get(self, "")
        others = {entry.rpartition(":")[2] for entry in str(config).split(",")} - {"mpitrain", ""}
        if others:
            raise ValueError(
                f"the process group was created for {config}; "
                f"PyTorch cannot combine mpitrain with {', '.join(others)}: "
                "use init_process_group('mpitrain'), and new_group(backend='nccl') for tensors on GPUs"
            )

    # The operations.

    def barrier(self, opts: Any = None) -> Operation:
        return self._operation("barrier", (), [], self._collectives.barrier(), opts)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Operation:
        return self._all_reduce("all_reduce", tensors, opts)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Operation:
        return self._all_reduce("all_reduce_coalesced", tensors, opts)

    def _all_reduce(self, name: str, tensors: list[Tensor], opts: Any) -> Operation:
        reduction = _reduction(opts, tensors)
        agreed = (reduction.name, *_shapes_of(tensors))
        if not any(tensor.is_sparse for tensor in tensors):
            return self._perform_in_place(name, agreed, tensors, opts, self._collectives.all_reduce, reduction)
        if not reduction.is_sum:
            raise ValueError(f"{name} of sparse tensors supports SUM and AVG only, not {reduction.name}")
        steps = chain.from_iterable(self._collectives.all_reduce_sparse(tensor, reduction) for tensor in tensors)
        return self._operation(name, agreed, tensors, steps, opts)

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> Operation:
        reduction, root = _reduction(opts, tensors), self._root("reduce", opts)
        agreed = (reduction.name, root, *_shapes_of(tensors))
        return self._perform_in_place("reduce", agreed, tensors, opts, self._collectives.reduce, reduction, root)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Operation:
        root = self._root("broadcast", opts)
        agreed = (root, *_shapes_of(tensors))
        return self._perform_in_place("broadcast", agreed, tensors, opts, self._collectives.broadcast, root)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Operation:
        return self._all_gather("all_gather", outputs, inputs, opts)

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Operation:
        rows = [[row[index] for row in outputs] for index in range(len(inputs))] if outputs else []
        return self._all_gather("all_gather_coalesced", rows, inputs, opts)

    def _all_gather(self, name: str, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> Operation:
        for row, tensor in zip(outputs, inputs, strict=True):
            check_sizes(row, tensor, self.size(), name)
        calls = [(row, [tensor]) for row, tensor in zip(outputs, inputs, strict=True)]
        return self._perform(name, _shapes_of(inputs), calls, opts, self._collectives.all_gather)

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Operation:
        return self.all_gather_single_coalesced([output], [tensor], opts)

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Operation:
        check_parts(outputs, inputs, self.size(), "the output")
        calls = [([output], [tensor]) for output, tensor in zip(outputs, inputs, strict=True)]
        return self._perform("all_gather_into_tensor", _shapes_of(inputs), calls, opts, self._collectives.all_gather)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Operation:
        (tensor,), root = inputs, self._root("gather", opts)
        row = outputs[0] if outputs and self.rank() == root else []
        if row:
            check_sizes(row, tensor, self.size(), "gather")
        agreed = (root, *_shapes_of(inputs))
        return self._perform("gather", agreed, [(row, inputs)], opts, self._collectives.gather, root)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> Operation:
        (tensor,), root = outputs, self._root("scatter", opts)
        row = inputs[0] if inputs and self.rank() == root else []
        if row:
            check_sizes(row, tensor, self.size(), "scatter")
        agreed = (root, *_shapes_of(outputs))
        return self._perform("scatter", agreed, [(outputs, row)], opts, self._collectives.scatter, root)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> Operation:
        for row, output in zip(inputs, outputs, strict=True):
            check_sizes(row, output, self.size(), "reduce_scatter", of="input")
        return self._reduce_scatter("reduce_scatter", outputs, inputs, opts)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Operation:
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> Operation:
        check_parts(inputs, outputs, self.size(), "the input")
        return self._reduce_scatter("reduce_scatter_tensor", outputs, [[tensor] for tensor in inputs], opts)

    def _reduce_scatter(self, name: str, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> Operation:
        reduction = _reduction(opts, outputs)
        calls = [([output], row) for output, row in zip(outputs, inputs, strict=True)]
        agreed = (reduction.name, *_shapes_of(outputs))
        return self._perform(name, agreed, calls, opts, self._collectives.reduce_scatter, reduction)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Operation:
        agreed = (str(inputs[0].dtype),)
        return self._perform("all_to_all", agreed, [(outputs, inputs)], opts, self._collectives.all_to_all, False)

    def all_to_all_single(
        self, output: Tensor, tensor: Tensor, output_sizes: Sequence[int], input_sizes: Sequence[int], opts: Any = None
    ) -> Operation:
        equal = not output_sizes and not input_sizes
        received_rows = split_rows(output, output_sizes, self.size())
        sent_rows = split_rows(tensor, input_sizes, self.size())

        def collective(received: list[Tensor], sent: list[Tensor]) -> Steps:
            return self._collectives.all_to_all(received[0].split(received_rows), sent[0].split(sent_rows), equal)

        agreed = _shapes_of([tensor]) if equal else (str(tensor.dtype), *tensor.shape[1:])
        return self._perform("all_to_all_single", agreed, [([output], [tensor])], opts, collective)

    # Messages between two ranks; these are not collective.

    def send(self, tensors: list[Tensor], rank: int, tag: int = 0) -> Message:
        (tensor,) = tensors
        flat = to_host(tensor)
        requests = [self._members.messages.Isend(part, rank, tag) for part in messages_of(flat)]
        return self._message(f"send to rank {rank}", rank, requests, tensor, flat, None)

    def recv(self, tensors: list[Tensor], rank: int, tag: int = 0) -> Message:
        return self._receive(tensors, rank, tag, f"recv from rank {rank}")

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> Message:
        return self._receive(tensors, MPI.ANY_SOURCE, tag, "recv from any rank")

    def _receive(self, tensors: list[Tensor], rank: int, tag: int, text: str) -> Message:
        (tensor,) = tensors
        flat = to_host(tensor, reads=False)
        parts = messages_of(flat)
        if len(parts) > 1 and rank == MPI.ANY_SOURCE:
            raise ValueError(f"recv from any rank takes at most 256 MiB; the tensor has {flat.nbytes} bytes")
        requests = [self._members.messages.Irecv(part, rank, tag) for part in parts]
        return self._message(text, rank, requests, tensor, flat, parts[-1][0].nbytes)

    def _message(
        self, text: str, rank: int, requests: list[MPI.Request], tensor: Tensor, flat: Tensor, nbytes: int | None
    ) -> Message:
        text = f"rank {self.rank()} of process group {self._members.name!r}, {text}, {_text_of(_shapes_of([tensor]))}"

        def has_ended() -> bool:
            return rank != MPI.ANY_SOURCE and self._members.has_ended(rank)

        return Message(text, requests, tensor, flat, nbytes, self._timeout_s, has_ended)

    # Names that older releases of PyTorch use.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


def _reduction(options: Any, tensors: Sequence[Tensor]) -> Reduction:
    return reduction_of(dist.ReduceOp.SUM if options is None else options.reduceOp, tensors[0].dtype)


def _describe(name: str, agreed: tuple[object, ...]) -> tuple[str, bytes, int]:
    """Return the text of an operation, also as bytes for ``Staging.sign``, and its signature."""
    text = " ".join([name, *map(_text_of, agreed)])
    encoded = text.encode()
    digest = hashlib.blake2b(encoded, digest_size=8).digest()
    return text, encoded[: TEXT_BYTES - 1] + b"\0", int.from_bytes(digest, "little", signed=True)


def _text_of(value: object) -> str:
    """Return a text such as ``float32``, ``(3, 4)`` or both."""
    if isinstance(value, torch.Size):
        return str(tuple(value))
    if isinstance(value, tuple):
        return " ".join(map(_text_of, value))
    return str(value).removeprefix("torch.")


def _shapes_of(tensors: Sequence[Tensor]) -> tuple[object, ...]:
    """Return the data types and shapes of tensors, which must be the same on all ranks."""
    if len(tensors) == 1:
        return (tensors[0].dtype, tensors[0].shape)
    return tuple((tensor.dtype, tensor.shape) for tensor in tensors)
