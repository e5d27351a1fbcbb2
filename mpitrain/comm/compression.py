"""Gradient compression with error feedback: the rounding error of one gradient is added to the next.

Seide, Fu, Droppo, Li and Yu, 1-bit stochastic gradient descent, Interspeech 2014, section 3. For convergence
at the rate of the exact method see Karimireddy, Rebjock, Stich and Jaggi, Error feedback fixes SignSGD, ICML 2019.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import numpy as np

from ..core.kernels import kernel
from ..core.layout import Array
from ..errors import ConfigError
from ..plan.config import Precision

_BLOCK = 1 << 14  # elements per block, so that intermediate values stay in the L2 cache


class Codec(ABC):
    """Rounds vectors to a narrower type and tracks the rounding error. Local.

    A subclass converts blocks, and is added to ``CODECS``.

    Args:
        name: The value of ``--push-precision``.
        dtype: Data type of the vectors.

    Attributes:
        wire: Data type of the encoded elements.
    """

    wire: np.dtype[Any]

    def __init__(self, name: str, dtype: np.dtype[Any]) -> None:
        self._name = name
        self._exact, self._back = np.empty(_BLOCK, dtype), np.empty(_BLOCK, dtype)

    @abstractmethod
    def narrow(self, exact: Array, out: Array) -> None:
        """Set ``out`` to a block of a vector, rounded to nearest. NaN stays NaN, and what is too large is infinite."""

    @abstractmethod
    def widen(self, wire: Array, out: Array) -> None:
        """Set ``out`` to an encoded block."""

    def encode(self, vector: Array, residual: Array, out: Array) -> None:
        """Set ``out`` to ``vector + residual``, rounded to nearest, and ``residual`` to the rounding error.

        NaN and infinity are passed through; their residual is zero.

        Args:
            vector, residual: Shape (n,), in the vectors' type.
            out: Shape (n,), in the type ``wire``.

        Raises:
            ConfigError: An element is too large for the narrower type.
        """
        for part in _blocks(len(vector)):
            count = part.stop - part.start
            exact, back = self._exact[:count], self._back[:count]
            np.add(vector[part], residual[part], out=exact)
            with np.errstate(over="ignore"):
                self.narrow(exact, out[part])
            self.widen(out[part], back)
            if _update_residual(exact, back, residual[part]):
                largest = np.abs(exact[np.isfinite(exact)]).max()
                raise ConfigError(
                    f"a gradient has an element of {largest:.3g}, which exceeds --push-precision {self._name}; "
                    "use bfloat16, remove --push-precision, or clip gradients (clip_norm)"
                )

    def decode(self, wire: Array, out: Array) -> None:
        """Decode ``wire`` into ``out``, in the vectors' type; both have shape (n,)."""
        for part in _blocks(len(wire)):
            self.widen(wire[part], out[part])


class Cast(Codec):
    """Converts to a type that NumPy has, of the same name."""

    def __init__(self, name: str, dtype: np.dtype[Any]) -> None:
        super().__init__(name, dtype)
        self.wire = np.dtype(name)

    def narrow(self, exact: Array, out: Array) -> None:
        np.copyto(out, exact, casting="same_kind")

    def widen(self, wire: Array, out: Array) -> None:
        np.copyto(out, wire)


class Bfloat16(Codec):
    """Converts to bfloat16, stored as uint16."""

    wire = np.dtype(np.uint16)

    def __init__(self, name: str, dtype: np.dtype[Any]) -> None:
        super().__init__(name, dtype)
        self._single = np.empty(_BLOCK, np.float32)

    def narrow(self, exact: Array, out: Array) -> None:
        single = self._single[: len(exact)]
        np.copyto(single, exact, casting="same_kind")
        _round_bfloat16(single.view(np.uint32), out)

    def widen(self, wire: Array, out: Array) -> None:
        single = self._single[: len(wire)]
        _upcast_bfloat16(wire, single.view(np.uint32))
        np.copyto(out, single)


#: By the value of ``--push-precision``.
CODECS: dict[Precision, type[Codec]] = {"float32": Cast, "float16": Cast, "bfloat16": Bfloat16}


def make_codec(precision: Precision, dtype: np.dtype[Any]) -> Codec:
    """Return the codec that rounds vectors of type ``dtype`` to a narrower type."""
    return CODECS[precision](precision, dtype)


def _blocks(size: int) -> Iterator[slice]:
    return (slice(start, min(start + _BLOCK, size)) for start in range(0, size, _BLOCK))


@kernel
def _update_residual(exact: Array, back: Array, residual: Array) -> bool:
    """Set ``residual = exact - back``, or zero if not finite; return whether a finite ``exact`` overflowed."""
    zero, too_large = residual.dtype.type(0), 0
    for i in range(residual.size):
        rest = exact[i] - back[i]
        fits = rest - rest == zero
        residual[i] = rest if fits else zero
        too_large += 0 if fits or exact[i] - exact[i] != zero else 1
    return too_large > 0


@kernel
def _upcast_bfloat16(wire: Array, bits: Array) -> None:
    for i in range(bits.size):
        bits[i] = np.uint32(wire[i]) << np.uint32(16)


@kernel
def _round_bfloat16(bits: Array, out: Array) -> None:
    """Round float32s, given as bits, to their upper halves: to nearest, ties to even."""
    nan = np.uint32(0x7FC0)  # a fixed NaN, since rounding could turn another one into infinity
    for i in range(out.size):
        magnitude = bits[i] & np.uint32(0x7FFFFFFF)
        sign = (bits[i] >> np.uint32(16)) & np.uint32(0x8000)
        rounded = (magnitude + np.uint32(0x7FFF) + ((magnitude >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        out[i] = np.uint16(sign | (nan if magnitude > np.uint32(0x7F800000) else rounded))
