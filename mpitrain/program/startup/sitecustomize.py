"""Python imports this module when a program of ``mpitrain run`` starts; it lets ``mpitrain stacks`` show stacks.

It also prevents PyTorch from aborting a program that uses gloo while the interpreter shuts down, and reports ranks that
have trained without communicating.

This module uses the standard library only, because the program may use another interpreter. Afterwards the import path
and PYTHONPATH have the user's values. If the user has a module of this name, it is then imported.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import importlib
import mmap
import os
import signal
import sys
import time
from typing import NoReturn

_OTHER_LAUNCHERS = {"torchrun", "torch.distributed.run", "torch.distributed.launch"}
_GLOO_THREAD = "pt_gloo_runloop"
_GLOO_S = 1.0  # maximum time for gloo's threads to release their tensors
_STACKS_PID, _ENDED = 6, 9  # indexes of words on the activity page, as in core.activity
_HANGS = 124  # as in process.reaper


def _register() -> None:
    """Write the stacks of this process when it gets the signal, unless another process of the rank writes them."""
    with open(os.environ["MPITRAIN_ACTIVITY"], "r+b") as file:
        words = memoryview(mmap.mmap(file.fileno(), 0)).cast("q")
    if words[_STACKS_PID] and os.path.exists(f"/proc/{words[_STACKS_PID]}"):
        return
    atexit.register(_mark_end, words, _recorded_exits())  # called last
    atexit.register(_report_independent_ranks)
    stacks = open(os.environ["MPITRAIN_STACKS"], "ab")  # noqa: SIM115 stays open
    faulthandler.register(signal.SIGRTMIN + 7, file=stacks)
    words[_STACKS_PID] = os.getpid()


def _recorded_exits() -> list[object]:
    """Let ``sys.exit`` record its arguments; return the list of them."""
    arguments: list[object] = []

    def exit(status: object = None, /) -> NoReturn:
        arguments.append(status)
        raise SystemExit(status)

    sys.exit = exit
    return arguments


def _mark_end(words: memoryview, exits: list[object]) -> None:
    """Mark that the interpreter of this process has ended, and with which status: its libraries may still hang.

    The argument of a SystemExit that was not raised by ``sys.exit`` is not known.
    """
    if words[_STACKS_PID] != os.getpid():
        return  # a process that the program has forked
    status = exits[-1] if exits else None
    if hasattr(sys, "last_type"):
        status = 1
    elif not exits and _raises_exits(sys.modules["__main__"]):
        status = _HANGS
    words[_ENDED] = 1 + (0 if status is None else status & 0xFF if isinstance(status, int) else 1)


def _raises_exits(main: object) -> bool:
    with contextlib.suppress(OSError, AttributeError), open(main.__file__, errors="replace") as source:  # type: ignore[attr-defined]
        return "SystemExit" in source.read()
    return False


def _warn_of_other_launchers() -> None:
    """Print once that torchrun starts ranks in each of several ranks of a host."""
    names = {os.path.basename(word) for word in sys.orig_argv[1:4]}
    several = os.environ.get("LOCAL_WORLD_SIZE", "1") != "1"
    if several and os.environ.get("RANK") == "0" and names & _OTHER_LAUNCHERS:
        print(
            f"mpitrain: each rank starts ranks of its own with {(names & _OTHER_LAUNCHERS).pop()}; to start them once, "
            "pass its program to mpitrain run, or start one rank per host",
            file=sys.stderr,
            flush=True,
        )


def _report_independent_ranks() -> None:
    """Print once, at the end, that ranks have trained and not communicated: each has then done all of the work."""
    size, is_first = os.environ.get("WORLD_SIZE", "1"), os.environ.get("RANK") == "0"
    has_failed = hasattr(sys, "last_type")
    if size == "1" or not is_first or has_failed or "MPITRAIN_INDEPENDENT" in os.environ:
        return
    with contextlib.suppress(Exception):  # torch's attributes may change
        if _has_trained() and not _has_communicated():
            print(
                f"mpitrain: the {size} ranks have trained, and have not communicated: each has done all of the work. A "
                "program uses several ranks if it calls torch.distributed.init_process_group, Horovod's API or MPI; "
                "Lightning Fabric and Accelerate do so if they are told the number of processes. For independent runs "
                "pass --env MPITRAIN_INDEPENDENT=1, and this line is not printed",
                file=sys.stderr,
                flush=True,
            )


def _has_trained() -> bool:
    """Return whether this process has made an optimizer of torch or Keras, or has imported Optax."""
    keras = sys.modules.get("keras")
    if keras is not None and any(isinstance(each, keras.optimizers.Optimizer) for each in gc.get_objects()):
        return True
    if "optax" in sys.modules:
        return True
    if "torch.optim.optimizer" not in sys.modules:
        return False
    classes = [sys.modules["torch.optim.optimizer"].Optimizer]
    for each in classes:
        classes += each.__subclasses__()
    return any(getattr(each.step, "hooked", False) for each in classes if hasattr(each, "step"))


def _has_communicated() -> bool:
    """Return whether this process has used an MPI library, or initialized a library that communicates."""
    with open("/proc/self/maps") as maps:
        if "/libmpi" in maps.read():
            return True
    groups, jax = (sys.modules.get(name) for name in ("torch.distributed.distributed_c10d", "jax._src.distributed"))
    of_torch = groups is not None and groups._backend is not None
    of_jax = jax is not None and jax.global_state.client is not None
    return of_torch or of_jax or "TF_CONFIG" in os.environ or "horovod" in sys.modules


def _wait_for_gloo() -> None:
    """Wait until gloo's threads are idle.

    An operation is complete before its thread has released the tensors. If the thread releases them while the
    interpreter shuts down, PyTorch aborts the process (PyTorch issue 190489).
    """
    deadline = time.monotonic() + _GLOO_S
    while _GLOO_THREAD in _thread_states() and time.monotonic() < deadline:
        time.sleep(0.001)  # releases the interpreter lock, for which these threads may wait
        if set(_thread_states().get(_GLOO_THREAD, "")) <= {"S"}:
            return


def _thread_states() -> dict[str, str]:
    """Return the states of this process's threads, such as ``RSS``, by name."""
    states: dict[str, str] = {}
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{thread}/stat", errors="replace") as file:
            name, _, rest = file.read().partition("(")[2].rpartition(")")
            states[name] = states.get(name, "") + rest.split()[0]
    return states


def _restore_path() -> None:
    """Remove this folder from the import path, and import the module that it hides."""
    folder = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != folder]
    users = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path not in ("", folder)]
    os.environ["PYTHONPATH"] = os.pathsep.join(users)
    if not users:
        del os.environ["PYTHONPATH"]
    own = sys.modules.pop("sitecustomize", None)
    try:
        importlib.import_module("sitecustomize")
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        if own is not None:
            sys.modules.setdefault("sitecustomize", own)


with contextlib.suppress(KeyError, OSError, ValueError, AttributeError):
    _register()
    _warn_of_other_launchers()
atexit.register(_wait_for_gloo)
_restore_path()
