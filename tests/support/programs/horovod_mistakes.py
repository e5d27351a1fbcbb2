"""Wrong uses of Horovod's API.

    python horovod_mistakes.py NAME...

Each rank prints a line of JSON for each mistake: its rank, and the type and text of the exception.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable

import torch

import mpitrain.horovod.torch as hvd
from mpitrain.comm.mpi import MPI

torch.set_num_threads(1)


def other_shape() -> None:
    hvd.allreduce(torch.zeros(3 + hvd.rank()), name="x")


def other_dtype() -> None:
    hvd.allreduce(torch.zeros(3, dtype=(torch.float32, torch.int64)[hvd.rank()]), name="x")


def other_reduction() -> None:
    hvd.allreduce(torch.zeros(3), name="x", op=(hvd.Sum, hvd.Max)[hvd.rank()])


def other_scale() -> None:
    hvd.allreduce(torch.zeros(3), name="x", prescale_factor=1.0 + hvd.rank())


def other_operation() -> None:
    if hvd.rank():
        hvd.broadcast(torch.zeros(3), 0, name="x")
    else:
        hvd.allreduce(torch.zeros(3), name="x")


def other_operation_without_name() -> None:
    if hvd.rank():
        hvd.allgather(torch.zeros(3))
    else:
        hvd.allreduce(torch.zeros(3))


def other_root() -> None:
    hvd.broadcast(torch.zeros(3), hvd.rank(), name="x")


def other_columns() -> None:
    hvd.allgather(torch.zeros(2, 3 + hvd.rank()), name="x")


def other_process_set() -> None:
    hvd.add_process_set([hvd.rank()])


def gather_after_join() -> None:
    if hvd.rank() == 0:
        hvd.join()
        raise RuntimeError("rank 0 has joined")
    try:
        hvd.allgather(torch.zeros(3), name="x")
    finally:
        hvd.join()


def gathered_scalar() -> None:
    hvd.allgather(torch.tensor(1.0))


def number_as_tensor() -> None:
    hvd.allreduce(3.0)  # type: ignore[arg-type]


def number_in_group() -> None:
    hvd.grouped_allreduce_async([torch.zeros(1), 3.0])  # type: ignore[list-item]


def no_tensors() -> None:
    hvd.grouped_allreduce([])


def sparse_tensor() -> None:
    hvd.allreduce(torch.eye(2).to_sparse())


def text_as_compression() -> None:
    hvd.allreduce(torch.zeros(3), compression="fp16")  # type: ignore[arg-type]


def number_as_handle() -> None:
    hvd.synchronize(12345)  # type: ignore[arg-type]


def model_as_optimizer() -> None:
    hvd.DistributedOptimizer(torch.nn.Linear(1, 1))  # type: ignore[arg-type]


def distributed_twice() -> None:
    optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), 0.1)
    hvd.DistributedOptimizer(hvd.DistributedOptimizer(optimizer))


def elastic_without_state() -> None:
    hvd.elastic.run(print)(3)


def unknown_root() -> None:
    hvd.broadcast(torch.zeros(3), 2)


def duplicate_name() -> None:
    handle = hvd.allreduce_async(torch.zeros(3), name="x")
    try:
        hvd.allreduce_async(torch.zeros(3), name="x")
    finally:
        hvd.synchronize(handle)


def indivisible_rows() -> None:
    hvd.alltoall(torch.zeros(3))


def too_many_rows() -> None:
    hvd.alltoall(torch.zeros(3), splits=[2, 2])


def scalar() -> None:
    hvd.reducescatter(torch.tensor(1.0))


def unknown_rank_in_set() -> None:
    hvd.add_process_set([0, 2])


def duplicate_set() -> None:
    hvd.add_process_set([0, 1])


def foreign_set() -> None:
    only_first = hvd.add_process_set([0])
    try:
        if hvd.rank():
            hvd.allreduce(torch.zeros(3), process_set=only_first)
        raise ValueError("rank 0 does not make the mistake")
    finally:
        hvd.remove_process_set(only_first)


def integers_by_adasum() -> None:
    hvd.allreduce(torch.zeros(3, dtype=torch.int32), op=hvd.Adasum)


def gradient_of_minimum() -> None:
    hvd.allreduce(torch.zeros(3, requires_grad=True), op=hvd.Min).sum().backward()


def optimizer_of(model: torch.nn.Module, **options: object) -> torch.optim.Optimizer:
    return hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), **options)


def twice_backward() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = optimizer_of(model)
    try:
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
    finally:
        optimizer.synchronize()


def early_zero_grad() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = optimizer_of(model)
    model(torch.ones(1, 2)).sum().backward()
    try:
        optimizer.zero_grad()
    finally:
        optimizer.synchronize()


def unnamed_parameter() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer_of(model, named_parameters=[("weight", model.weight)])


def predivided_sum() -> None:
    optimizer_of(torch.nn.Linear(2, 2), op=hvd.Sum, gradient_predivide_factor=2.0)


# Mistakes after which the ranks cannot continue.


def absent_rank() -> None:
    """Rank 1 comes when rank 0 does not wait any more, after HOROVOD_STALL_SHUTDOWN_TIME_SECONDS."""
    comm = MPI.COMM_WORLD.Dup()
    if hvd.rank():
        comm.recv(source=0)
    try:
        hvd.allreduce(torch.zeros(3), name="x")
    finally:
        if hvd.rank() == 0:
            comm.send(None, 1)


def exiting_rank() -> None:
    if hvd.rank():
        sys.exit(0)
    hvd.allreduce(torch.zeros(3), name="x")


def shut_down_rank() -> None:
    if hvd.rank():
        hvd.shutdown()
        raise ValueError("rank 1 does not make the mistake")
    hvd.allreduce(torch.zeros(3), name="x")


def raising_rank() -> None:
    if hvd.rank():
        raise ValueError("a mistake of the program")
    hvd.allreduce(torch.zeros(3), name="x")
    print("continued")


def killed_rank() -> None:
    if hvd.rank():
        os.kill(os.getpid(), signal.SIGKILL)
    hvd.allreduce(torch.zeros(3), name="x")
    print("continued")


def not_initialized() -> None:
    hvd.shutdown()
    hvd.allreduce(torch.zeros(3), name="x")


def main() -> None:
    rank = -1
    try:
        hvd.init()
        rank = hvd.rank()
    except Exception as error:
        print(json.dumps({"rank": rank, "mistake": "init", "error": type(error).__name__, "text": str(error)}))
        return
    for name in sys.argv[1:]:
        mistake: Callable[[], None] = globals()[name]
        if name == "raising_rank":
            mistake()
        try:
            mistake()
        except Exception as error:
            line = {"rank": rank, "mistake": name, "error": type(error).__name__, "text": str(error)}
            print(json.dumps(line), flush=True)


main()
