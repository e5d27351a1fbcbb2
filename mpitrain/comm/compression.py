"""Codecs: vectors as fewer bytes, with error feedback, so that the error of one gradient is added to the next.

Seide, Fu, Droppo, Li and Yu, 1-bit stochastic gradient descent, Interspeech 2014, section 3. For convergence
at the rate of the exact method see Karimireddy, Rebjock, Stich and Jaggi, Error feedback fixes SignSGD, ICML 2019.
"""

from __future__ import annotations

import importlib
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import numpy as np

from ..core.layout import Array
from ..core.words import one_line
from ..errors import ConfigError
from ..plan.compression import Compression
from .compression_kernels import (
    GROUP,
    decode_int4,
    decode_int8,
    encode_int4,
    encode_int8,
    round_bfloat16,
    scatter,
    select_largest,
    upcast_bfloat16,
    update_residual,
)

_BLOCK = 1 << 14  # elements per block, so that intermediate values stay in the L2 cache
_BINS = 1 << 12  # number of bins of magnitudes, by the exponent and the first 4 bits of the mantissa
WORD = 8  # bytes; an encoded vector consists of whole words, so that the next vector in a message is aligned


class Codec(ABC):
    """Encodes vectors as bytes and tracks the error. Local.

    A vector consists of gradients and of changes of layer state, such as running variances. Their magnitudes differ.

    A subclass may be in a user's module: ``--compress package.module:Class``. The number of bytes must depend on the
    number of elements alone, because the receivers compute it.

    Args:
        compression: The value of ``--compress``.
        dtype: Data type of the vectors.
    """

    def __init__(self, compression: Compression, dtype: np.dtype[Any]) -> None:
        self.compression, self.dtype = compression, dtype

    @abstractmethod
    def nbytes(self, count: int) -> int:
        """Return the number of bytes of ``count`` encoded elements, a multiple of 8."""

    @abstractmethod
    def encode(self, vector: Array, residual: Array, out: Array) -> None:
        """Set ``out`` to ``vector + residual``, encoded, and ``residual`` to the error: exact minus decoded values.

        A vector with non-finite elements decodes to one with non-finite elements; the residual of these elements is
        zero. ``vector`` must not change. An element whose residual is zero counts as sent: if workers apply momentum,
        its velocity is then set to zero.

        Args:
            vector, residual: Shape (n,), in the vectors' type.
            out: Shape (nbytes(n),), uint8, aligned to 8 bytes.

        Raises:
            ConfigError: An element is too large for the encoding.
        """

    @abstractmethod
    def decode(self, encoded: Array, out: Array) -> None:
        """Set ``out``, shape (n,), in the vectors' type, to the vector in ``encoded``, shape (nbytes(n),), uint8."""


class NarrowerType(Codec):
    """Rounds to the nearest value of a narrower type. A subclass converts blocks.

    Attributes:
        narrow_type: Data type of the encoded elements.
    """

    narrow_type: np.dtype[Any]

    def __init__(self, compression: Compression, dtype: np.dtype[Any]) -> None:
        super().__init__(compression, dtype)
        self._exact, self._back = np.empty(_BLOCK, dtype), np.empty(_BLOCK, dtype)

    @abstractmethod
    def narrow(self, exact: Array, out: Array) -> None:
        """Set ``out`` to a block of a vector, rounded to nearest. NaN stays NaN; too large values become infinite."""

    @abstractmethod
    def widen(self, narrow: Array, out: Array) -> None:
        """Set ``out`` to the values of an encoded block."""

    def nbytes(self, count: int) -> int:
        return _whole_words(count * self.narrow_type.itemsize)

    def encode(self, vector: Array, residual: Array, out: Array) -> None:
        elements = self._elements(out, len(vector))
        for part in _blocks(len(vector)):
            count = part.stop - part.start
            exact, back = self._exact[:count], self._back[:count]
            np.add(vector[part], residual[part], out=exact)
            with np.errstate(over="ignore"):
                self.narrow(exact, elements[part])
            self.widen(elements[part], back)
            if update_residual(exact, back, residual[part]):
                raise _too_large(exact, self.compression)

    def decode(self, encoded: Array, out: Array) -> None:
        elements = self._elements(encoded, len(out))
        for part in _blocks(len(out)):
            self.widen(elements[part], out[part])

    def _elements(self, encoded: Array, count: int) -> Array:
        return encoded.view(self.narrow_type)[:count]


class Cast(NarrowerType):
    """Converts to the NumPy type of the same name as the codec."""

    def __init__(self, compression: Compression, dtype: np.dtype[Any]) -> None:
        super().__init__(compression, dtype)
        self.narrow_type = np.dtype(compression.name)

    def narrow(self, exact: Array, out: Array) -> None:
        np.copyto(out, exact, casting="same_kind")

    def widen(self, narrow: Array, out: Array) -> None:
        np.copyto(out, narrow)


class Bfloat16(NarrowerType):
    """Converts to bfloat16, stored as uint16."""

    narrow_type = np.dtype(np.uint16)

    def __init__(self, compression: Compression, dtype: np.dtype[Any]) -> None:
        super().__init__(compression, dtype)
        self._single = np.empty(_BLOCK, np.float32)

    def narrow(self, exact: Array, out: Array) -> None:
        single = self._single[: len(exact)]
        np.copyto(single, exact, casting="same_kind")
        round_bfloat16(single.view(np.uint32), out)

    def widen(self, narrow: Array, out: Array) -> None:
        single = self._single[: len(narrow)]
        upcast_bfloat16(narrow, single.view(np.uint32))
        np.copyto(out, single)


class Int8(Codec):
    """Rounds to integers from -127 to 127 times a float32 scale; each group of 256 elements has its own scale.

    The scales precede the integers. Dettmers, 8-bit approximations for parallelism in deep learning, ICLR 2016, and
    Dettmers et al., 8-bit optimizers via block-wise quantization, ICLR 2022; here with linear steps.
    """

    def nbytes(self, count: int) -> int:
        return _whole_words(4 * _groups(count) + count)

    def encode(self, vector: Array, residual: Array, out: Array) -> None:
        scales, integers = self._parts(out, len(vector))
        encode_int8(vector, residual, scales, integers)
        _check_scales(scales, vector, self.compression)

    def decode(self, encoded: Array, out: Array) -> None:
        decode_int8(*self._parts(encoded, len(out)), out)

    def _parts(self, encoded: Array, count: int) -> tuple[Array, Array]:
        start = 4 * _groups(count)
        return encoded[:start].view(np.float32), encoded[start : start + count].view(np.int8)


class Int4(Codec):
    """Rounds to integers from -7 to 7 times a float32 scale; each group of 256 elements has its own scale.

    The scales precede the integers. A byte holds two integers, each plus 8; the first is in the lower half.
    """

    def nbytes(self, count: int) -> int:
        return _whole_words(4 * _groups(count) + (count + 1) // 2)

    def encode(self, vector: Array, residual: Array, out: Array) -> None:
        scales, pairs = self._parts(out, len(vector))
        encode_int4(vector, residual, scales, pairs)
        _check_scales(scales, vector, self.compression)

    def decode(self, encoded: Array, out: Array) -> None:
        decode_int4(*self._parts(encoded, len(out)), out)

    def _parts(self, encoded: Array, count: int) -> tuple[Array, Array]:
        start = 4 * _groups(count)
        return encoded[:start].view(np.float32), encoded[start : start + (count + 1) // 2]


class TopK(Codec):
    """Sends the elements of the largest magnitude, with their indices; all others remain in the residual.

    Aji and Heafield, Sparse communication for distributed gradient descent, EMNLP 2017. Magnitudes are compared by
    exponent and 4 bits of the mantissa, that is with a resolution of 6 %; of equal elements, the first are sent.
    """

    def nbytes(self, count: int) -> int:
        sent = self._sent(count)
        return _whole_words(4 * sent) + _whole_words(sent * self.dtype.itemsize)

    def encode(self, vector: Array, residual: Array, out: Array) -> None:
        indices, values = self._parts(out, len(vector))
        select_largest(vector, residual, np.zeros(_BINS, np.int64), indices, values)

    def decode(self, encoded: Array, out: Array) -> None:
        out[:] = 0
        scatter(*self._parts(encoded, len(out)), out)

    def _sent(self, count: int) -> int:
        return min(count, math.ceil(self.compression.fraction * count))

    def _parts(self, encoded: Array, count: int) -> tuple[Array, Array]:
        sent, start = self._sent(count), _whole_words(4 * self._sent(count))
        return encoded[: 4 * sent].view(np.uint32), encoded[start:].view(self.dtype)[:sent]


#: The codecs by the value of ``--compress``.
CODECS: dict[str, type[Codec]] = {
    "float32": Cast,
    "float16": Cast,
    "bfloat16": Bfloat16,
    "int8": Int8,
    "int4": Int4,
    "topk": TopK,
}


def make_codec(compression: Compression, dtype: np.dtype[Any]) -> Codec:
    """Return the codec of ``--compress`` for vectors of type ``dtype``. Local.

    Raises:
        ConfigError: ``--compress`` names a class that cannot be imported, is not a ``Codec``, or whose constructor
            fails.
    """
    if not compression.is_class:
        return CODECS[compression.name](compression, dtype)
    make = _load(compression)
    try:
        return make(compression, dtype)
    except Exception as error:
        why = f"{type(error).__name__}: {one_line(error)}"
        raise ConfigError(f"--compress {compression}: the constructor fails: {why}") from error


def _load(compression: Compression) -> type[Codec]:
    module, _, name = compression.name.partition(":")
    try:
        loaded: Any = getattr(importlib.import_module(module), name)
    except Exception as error:
        why = f"{type(error).__name__}: {one_line(error)}"
        must = "must name a class in a module that Python can import"
        raise ConfigError(f"--compress {compression}: {why}; {must}") from error
    if not (isinstance(loaded, type) and issubclass(loaded, Codec)):
        raise ConfigError(f"--compress {compression}: must be a subclass of mpitrain.comm.compression.Codec")
    return loaded


def _check_scales(scales: Array, vector: Array, compression: Compression) -> None:
    """Check the scales of an encoded vector: a group with NaN or infinity has the scale NaN.

    Raises:
        ConfigError: A scale is infinite, because float32 cannot hold it.
    """
    if np.isinf(scales).any():
        raise _too_large(vector, compression)


def _too_large(vector: Array, compression: Compression) -> ConfigError:
    """Return the error for a vector with an element that is too large for the encoding."""
    largest = np.abs(vector[np.isfinite(vector)]).max()
    advice = "use bfloat16, or remove" if compression.name == "float16" else "remove"
    return ConfigError(
        f"a gradient has an element of {largest:.3g}, which exceeds --compress {compression}; "
        f"{advice} --compress (clip_norm does not help: it applies to received gradients)"
    )


def _groups(count: int) -> int:
    return -(-count // GROUP)


def _whole_words(nbytes: int) -> int:
    return -(-nbytes // WORD) * WORD


def _blocks(size: int) -> Iterator[slice]:
    return (slice(start, min(start + _BLOCK, size)) for start in range(0, size, _BLOCK))
