"""Compilation of kernels with Numba, whose import takes 0.4 s; ``kernels`` imports this module when it needs it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils, event
from numba.core.registry import cpu_target
from numba.extending import intrinsic, typeof_impl

from . import activity
from .kernel_cache import KernelCache
from .kernels import Deferred

_log = logging.getLogger(__name__)
_COMPILE = activity.KINDS.index("compile")


class _Listener(event.Listener):  # type: ignore[misc]
    """Marks and times compilations, and logs the first one. Kernels loaded from the cache are not compiled."""

    seconds = 0.0
    _logged, _depth, _began = False, 0, 0.0

    def on_start(self, event: object) -> None:
        activity.enter(_COMPILE)
        if self._depth == 0:
            self._began = time.perf_counter()
        self._depth += 1  # a kernel that calls another kernel compiles it, too
        if not self._logged:
            self._logged = True
            _log.info("compiling kernels for this machine and model type; this takes up to a minute, once")

    def on_end(self, event: object) -> None:
        activity.leave()
        self._depth -= 1
        if self._depth == 0:
            self.seconds += time.perf_counter() - self._began


listener = _Listener()
event.register("numba:compile", listener)


def compile_kernel(function: Callable[..., Any], fastmath: bool | set[str]) -> Any:
    """Return a function that Numba compiles at its first call, unless it is stored; see ``kernels``."""
    compiled: Any = numba.njit(nogil=True, fastmath=fastmath, error_model="numpy")(function)
    compiled._cache = KernelCache(function)
    return compiled


@typeof_impl.register(Deferred)
def _typeof_deferred(value: Deferred, context: Any) -> Any:
    """Return the type of a kernel that another kernel calls."""
    return cpu_target.typing_context.resolve_value_type(value.real)


@intrinsic
def prefetch(typing_context: Any, row: Any, index: Any) -> Any:
    """In a kernel: prefetch the cache line of ``row[index]``; ``row`` is 1-D and C-contiguous."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        view = context.make_array(signature.args[0])(context, builder, args[0])
        place = context.cast(builder, args[1], signature.args[1], types.intp)
        pointer = builder.bitcast(builder.gep(view.data, [place]), cgutils.voidptr_t)
        number = cgutils.int32_t
        called = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, number, number, number])
        function = cgutils.get_or_insert_function(builder.module, called, "llvm.prefetch.p0")
        builder.call(function, [pointer, number(0), number(3), number(1)])  # to read, to every level, data
        return context.get_dummy_value()

    return types.void(row, index), generate
