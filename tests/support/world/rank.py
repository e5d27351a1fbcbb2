"""A rank of a world: calls the functions that the controller sends, and restores the state of the process."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import os
import pickle
import sys
import traceback
from pathlib import Path

from mpitrain.comm.mpi import MPI, start

from .controller import connect
from .messages import STACKS_SIGNAL, Failed, Returned, Task
from .process_state import ProcessState, watch_shared_memory

# Variables that describe the world's ranks; each call has its own.
_OF_LAUNCHERS = ("OMPI_COMM_WORLD", "PMI_", "PMIX_", "MPI_LOCAL", "HYDRA", "HYDI", "PRTE_")


def main(address: str, *modules: str) -> None:
    world = start()
    for module in modules:
        importlib.import_module(module)
    for name in [name for name in os.environ if name.startswith(_OF_LAUNCHERS)]:
        del os.environ[name]
    stacks = open(Path(address).parent / f"stacks-{os.getpid()}", "wb")  # noqa: SIM115 stays open
    faulthandler.register(STACKS_SIGNAL, file=stacks)
    watch_shared_memory()
    connection = connect(address, world.rank)
    communicators: dict[int, MPI.Intracomm] = {}
    while True:
        try:
            task: Task = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            break
        except BaseException:
            connection.send_bytes(pickle.dumps(Failed(traceback.format_exc())))
            continue
        gc.collect()
        gc.freeze()  # mpitrain and the collector need not search the modules of earlier tests for objects of this one
        if task.n not in communicators:
            communicators[task.n] = world.Create_group(world.group.Incl(range(task.n)))
            communicators[task.n].allreduce(0)  # mpi4py now makes the communicator that such sums use
        try:
            reply = pickle.dumps(_called(task, communicators[task.n]))
        except Exception:  # the result cannot be pickled
            reply = pickle.dumps(Failed(traceback.format_exc()))
        connection.send_bytes(reply)
    os._exit(0)  # without the end of MPI, which is collective


def _called(task: Task, comm: MPI.Intracomm) -> Returned | Failed:
    state = ProcessState()
    world, MPI.COMM_WORLD = MPI.COMM_WORLD, comm
    try:
        value = task.function(*task.arguments)
    except BaseException:
        return Failed(traceback.format_exc())
    finally:
        MPI.COMM_WORLD = world
        sys.stdout.flush()
        sys.stderr.flush()
    comm.Barrier()  # files of the ranks that are not done yet are no leaks
    leaks = state.restore(task.frees)
    comm.Barrier()
    return Returned(value, leaks)


if __name__ == "__main__":
    main(*sys.argv[1:])
