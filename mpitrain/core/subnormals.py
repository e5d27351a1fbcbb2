"""Flush subnormal numbers to zero, in the threads of this process.

A product with a subnormal operand or result takes some 20 times as long on Intel's CPUs. The moments of Adam become
subnormal wherever an input is rarely different from zero. The mode is a property of a thread, which a new thread
inherits from the thread that starts it. On x86, the mode is set by the bits DAZ and FTZ of MXCSR (Intel 64 and IA-32
Architectures Software Developer's Manual, volume 1, section 10.2.3). On Arm, it is set by the bit FZ of FPCR (Arm
Architecture Reference Manual).
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterator
from contextlib import contextmanager

# By CPU architecture: the index of the control register in C's fenv_t, in words of 32 bits; and the bits that flush.
_REGISTERS = {"x86_64": (7, 0x8040), "aarch64": (0, 1 << 24)}
_WORDS = 64  # larger than any fenv_t

try:
    _library = ctypes.CDLL("libm.so.6")
except OSError:  # this C library has no separate library for mathematics
    _library = ctypes.CDLL(None)
_register = _REGISTERS.get(platform.machine())


def are_flushed() -> bool:
    """Return whether this thread flushes subnormal numbers to zero."""
    return _register is not None and _bits() == _register[1]


def flush(enabled: bool) -> None:
    """Turn flush-to-zero on or off for this thread; threads that it starts later inherit the setting.

    No effect on CPUs other than x86-64 and aarch64.
    """
    if _register is not None:
        _set_bits(_register[1] if enabled else 0)


@contextmanager
def flushed(enabled: bool) -> Iterator[None]:
    """Turn flush-to-zero on or off inside the block; afterwards restore this thread's mode."""
    if _register is None:
        yield
        return
    before = _bits()
    flush(enabled)
    try:
        yield
    finally:
        _set_bits(before)


def _bits() -> int:
    """Return the bits of this thread's register that flush."""
    assert _register is not None
    word, bits = _register
    return _environment()[word] & bits


def _set_bits(value: int) -> None:
    assert _register is not None
    word, bits = _register
    environment = _environment()
    environment[word] = environment[word] & ~bits | value
    _library.fesetenv(environment)


def _environment() -> ctypes.Array[ctypes.c_uint32]:
    environment = (ctypes.c_uint32 * _WORDS)()
    _library.fegetenv(environment)
    return environment
