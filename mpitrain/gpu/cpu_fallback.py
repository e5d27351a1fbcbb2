"""CPU fallback for element kernels without a GPU implementation."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import cupy

from ..errors import DeviceError

_log = logging.getLogger(__name__)


class CpuFallback:
    """A kernel that copies its arrays from the GPU and back for every call: correct but slow.

    Args:
        is_soft: Whether the fallback is allowed.

    Raises:
        DeviceError: The fallback is not allowed.
    """

    def __init__(self, kernel: Callable[..., Any], is_soft: bool) -> None:
        name = kernel.__name__
        if not is_soft:
            raise DeviceError(
                f"--no-soft-placement: the kernel {name} of {kernel.__module__} has no GPU implementation; "
                "remove --no-soft-placement to run it on the CPU, or write the layer with device.xp"
            )
        self._kernel = kernel
        _log.warning(
            "the kernel %s of %s has no GPU implementation and runs on the CPU, which is slow", name, kernel.__module__
        )

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
