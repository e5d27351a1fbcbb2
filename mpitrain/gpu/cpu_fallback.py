"""Element kernels that have no form for GPUs: the processor runs them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cupy

from ..errors import DeviceError


class CpuFallback:
    """A kernel whose arrays come from the GPU for every call, and go back: right, and slow.

    Args:
        say: Takes a line for the user, once.
        is_soft: Whether that is allowed.

    Raises:
        DeviceError: It is not.
    """

    def __init__(self, kernel: Callable[..., Any], say: Callable[[str], None], is_soft: bool) -> None:
        name = kernel.__name__
        if not is_soft:
            raise DeviceError(
                f"--no-soft-placement: the kernel {name} of {kernel.__module__} has no form for GPUs; "
                "leave it out to have the processor run it, or write the layer with device.xp"
            )
        self._kernel = kernel
        say(f"the kernel {name} of {kernel.__module__} has no form for GPUs: the processor runs it, which is slow")

    def __call__(self, *arguments: Any) -> Any:
        """The kernel's result, when it is there."""
        hosts = [array.get() if isinstance(array, cupy.ndarray) else array for array in arguments]
        result = self._kernel(*hosts)
        for array, host in zip(arguments, hosts, strict=True):
            if isinstance(array, cupy.ndarray):
                back = cupy.empty(host.shape, host.dtype)
                back.set(host)
                array[...] = back
        return result
