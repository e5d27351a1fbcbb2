"""Subnormal numbers as zero, in the threads of this process.

A product with a subnormal operand or result takes some 20 times as long on Intel's CPUs. The moments of Adam become
subnormal wherever an input is rarely different from zero. The mode is a property of a thread, which a new thread
inherits from the thread that starts it. Bits: DAZ and FTZ of MXCSR (Intel 64 and IA-32 Architectures Software
Developer's Manual, volume 1, section 10.2.3), FZ of FPCR (Arm Architecture Reference Manual, FPCR).
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterator
from contextlib import contextmanager

# Per machine: the index of the control register in C's fenv_t, in words of 32 bits; and the bits that flush.
_REGISTERS = {"x86_64": (7, 0x8040), "aarch64": (0, 1 << 24)}
_WORDS = 64  # more than any fenv_t has

try:
    _library = ctypes.CDLL("libm.so.6")
except OSError:  # a C library without a separate one for mathematics
    _library = ctypes.CDLL(None)
_register = _REGISTERS.get(platform.machine())


def are_flushed() -> bool:
    """Return whether this thread computes with subnormal numbers as zero."""
    if _register is None:
        return False
    word, bits = _register
    return _environment()[word] & bits == bits


def flush(enabled: bool) -> None:
    """Make this thread, and those that it starts from now on, compute with subnormal numbers as zero, or as they are.

    Without effect on CPUs that are neither x86 nor ARM.
    """
    if _register is None or are_flushed() == enabled:
        return
    word, bits = _register
    environment = _environment()
    environment[word] = environment[word] | bits if enabled else environment[word] & ~bits
    _library.fesetenv(environment)


@contextmanager
def flushed(enabled: bool) -> Iterator[None]:
    """Flush inside the block; afterwards the thread is as before."""
    before = are_flushed()
    flush(enabled)
    try:
        yield
    finally:
        flush(before)


def _environment() -> ctypes.Array[ctypes.c_uint32]:
    environment = (ctypes.c_uint32 * _WORDS)()
    _library.fegetenv(environment)
    return environment
