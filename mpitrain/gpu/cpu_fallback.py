"""CPU fallback for element kernels without a GPU implementation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cupy

from ..errors import DeviceError


class CpuFallback:
    """A kernel that copies its arrays from the GPU and back for every call: correct but slow.

    Args:
        say: Prints a line for the user, once.
        is_soft: Whether the fallback is allowed.

    Raises:
        DeviceError: It is not allowed.
    """

    def __init__(self, kernel: Callable[..., Any], say: Callable[[str], None], is_soft: bool) -> None:
        name = kernel.__name__
        if not is_soft:
            raise DeviceError(
                f"--no-soft-placement: the kernel {name} of {kernel.__module__} has no GPU implementation; "
                "remove --no-soft-placement to run it on the CPU, or write the layer with device.xp"
            )
        self._kernel = kernel
        say(f"the kernel {name} of {kernel.__module__} has no GPU implementation and runs on the CPU, which is slow")

    def __call__(self, *arguments: Any) -> Any:
        """Run the kernel and return its result; waits for the GPU."""
        hosts = [array.get() if isinstance(array, cupy.ndarray) else array for array in arguments]
        result = self._kernel(*hosts)
        for array, host in zip(arguments, hosts, strict=True):
            if isinstance(array, cupy.ndarray):
                back = cupy.empty(host.shape, host.dtype)
                back.set(host)
                array[...] = back
        return result
