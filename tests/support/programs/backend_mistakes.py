"""Wrong uses of the backend, by name; the ranks print the exceptions as JSON.

    python backend_mistakes.py NAME...

If one mistake is named, the ranks end with its exception; the exceptions of several mistakes are caught one by one.
"""

from __future__ import annotations

import datetime
import json
import os
import signal
import sys
import time

import torch
import torch.distributed as dist

RANK = int(next(os.environ[name] for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK") if name in os.environ))


def start(seconds: float = 20, **options: object) -> None:
    dist.init_process_group(
        "mpitrain", timeout=datetime.timedelta(seconds=seconds), init_method="mpitrain://", **options
    )


def wait_for_the_end() -> None:
    """Wait until the failure of another rank ends this process."""
    time.sleep(80)


def absent_rank() -> None:
    start(2)
    dist.barrier()
    if RANK != 1:
        dist.all_reduce(torch.ones(3, 4))
    wait_for_the_end()


def absent_rank_asynchronous() -> None:
    start(2)
    if RANK != 1:
        dist.all_reduce(torch.ones(3, 4), async_op=True).wait()
    wait_for_the_end()


def absent_rank_in_future() -> None:
    start(2)
    if RANK != 1:
        dist.all_reduce(torch.ones(3, 4), async_op=True).get_future().wait()
    wait_for_the_end()


def other_shape() -> None:
    start()
    dist.all_reduce(torch.ones(3 + RANK))


def other_dtype() -> None:
    start()
    dist.all_reduce(torch.ones(3, dtype=torch.float64 if RANK else torch.float32))


def other_reduction() -> None:
    start()
    dist.all_reduce(torch.ones(3), dist.ReduceOp.MAX if RANK else dist.ReduceOp.SUM)


def other_operation() -> None:
    start()
    if RANK:
        dist.broadcast(torch.ones(3), 0)
    else:
        dist.all_reduce(torch.ones(3))


def other_root() -> None:
    start()
    dist.broadcast(torch.ones(3), RANK)


def unknown_root() -> None:
    start()
    dist.broadcast(torch.ones(3), 2)


def other_large_shape() -> None:
    start()
    dist.all_reduce(torch.ones(1_000_000 + RANK))


def other_sizes() -> None:
    start()
    sent = [1, 2] if RANK == 0 else [3, 4]
    dist.all_to_all_single(torch.empty(9), torch.ones(sum(sent)), [1, 8], sent)


def short_message() -> None:
    start()
    if RANK == 0:
        dist.send(torch.ones(3), 1)
        wait_for_the_end()
    else:
        dist.recv(torch.ones(4), 0)


def no_message() -> None:
    start(2)
    if RANK:
        dist.recv(torch.ones(4), 0)
    wait_for_the_end()


def killed_rank() -> None:
    start()
    dist.barrier()
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(3))


def raising_rank() -> None:
    start()
    dist.barrier()
    if RANK == 1:
        raise ValueError("a mistake of the program")
    dist.all_reduce(torch.ones(3))


def exiting_rank() -> None:
    start()
    dist.barrier()
    if RANK == 1:
        sys.exit(3)
    dist.all_reduce(torch.ones(3))


def vanishing_rank() -> None:
    start()
    dist.barrier()
    if RANK == 1:
        os._exit(0)
    dist.all_reduce(torch.ones(3))
    print("continued")


def absent_in_new_group() -> None:
    start(2)
    if RANK != 1:
        dist.new_group([0, 1], timeout=datetime.timedelta(seconds=2))
    wait_for_the_end()


def mixed_backends() -> None:
    dist.init_process_group("cpu:mpitrain,cuda:nccl", init_method="mpitrain://")
    dist.all_reduce(torch.ones(3))


def sparse_tensor() -> None:
    start()
    dist.broadcast(torch.eye(3).to_sparse(), 0)


def low_thread_level() -> None:
    import mpi4py

    mpi4py.rc.thread_level = "funneled"
    from mpi4py import MPI  # starts MPI

    assert MPI.Is_initialized()
    start()


def monitored_barrier() -> None:
    start()
    dist.monitored_barrier()


def complex_maximum() -> None:
    start()
    dist.all_reduce(torch.ones(3, dtype=torch.complex64), dist.ReduceOp.MAX)


def too_few_rows() -> None:
    start()
    dist.all_gather_into_tensor(torch.empty(5), torch.ones(3))


for name in sys.argv[1:]:
    try:
        globals()[name]()
    except Exception as error:
        line = {"mistake": name, "rank": RANK, "error": type(error).__name__, "text": str(error)}
        print(json.dumps(line), flush=True)
        if len(sys.argv) == 2:
            raise
    dist.destroy_process_group()
