"""Codecs of ranges of the flat vector, and the checks of a user's codec.

The alignment gaps of a gradient are zero, because no layer writes them. A codec may decode them to other values: for
example to the mean magnitude if the codec sends signs, or to NaN if an element of the same group is NaN. These values
would stay in this and all later gradients. Therefore gaps are set to zero after decoding, and have no residual. All
else that depends on the position in the vector belongs here, too, because a ``Codec`` depends on the number of elements
alone.
"""

from __future__ import annotations

import operator
import traceback
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from ..core import activity
from ..core.kernels import kernel
from ..core.layout import Array, Layout
from ..core.words import one_line
from ..errors import ConfigError
from ..plan.compression import Compression
from .compression import WORD, Codec, make_codec
from .mpi import MPI

_COUNTS = (0, 1, 1000)  # numbers of elements with which every user-defined codec is tried
_MOST = 1 << 22  # maximum number of elements of test vectors, to limit their memory


class VectorCodec:
    """Encodes ranges of a flat vector with error feedback. Local.

    Args:
        codec: Encodes the elements.
        gaps: The elements that belong to no parameter, ascending.
    """

    def __init__(self, codec: Codec, gaps: Array) -> None:
        self._codec, self._gaps = codec, gaps

    def part(self, lo: int, hi: int) -> VectorCodec:
        """Return the codec of a vector that is the range [lo, hi) of this vector."""
        return VectorCodec(self._codec, self._gaps_of(lo, hi))

    def of_range(self, lo: int, hi: int) -> RangeCodec:
        """Return the codec of the elements [lo, hi)."""
        return RangeCodec(self._codec, hi - lo, self._gaps_of(lo, hi))

    def _gaps_of(self, lo: int, hi: int) -> Array:
        first, last = np.searchsorted(self._gaps, (lo, hi))
        return self._gaps[first:last] - lo


class RangeCodec:
    """Encodes one range of a flat vector. Local.

    Args:
        codec: Encodes the elements.
        count: Number of elements in the range.
        gaps: The elements that belong to no parameter.

    Attributes:
        nbytes: Number of bytes of the encoded range.
    """

    def __init__(self, codec: Codec, count: int, gaps: Array) -> None:
        self._codec, self._gaps = codec, gaps
        self.nbytes = operator.index(codec.nbytes(count))

    def encode(self, vector: Array, residual: Array, out: Array) -> None:
        """Set ``out`` to ``vector + residual``, encoded, and ``residual`` to the error; see ``Codec.encode``.

        Raises:
            ConfigError: An element is too large for the encoding, or a user's codec fails.
        """
        with _errors_of(self._codec):
            self._codec.encode(vector, residual, out)
        if self._codec.compression.is_class:
            _drop_non_finite(residual)
        residual[self._gaps] = 0

    def decode(self, encoded: Array, out: Array) -> None:
        """Set ``out`` to the vector in ``encoded``, and its gaps to zero.

        Raises:
            ConfigError: A user's codec fails.
        """
        with _errors_of(self._codec):
            self._codec.decode(encoded, out)
        out[self._gaps] = 0


def make_vector_codec(
    compression: Compression, dtype: np.dtype[Any], layout: Layout, comm: MPI.Intracomm, counts: Collection[int]
) -> VectorCodec:
    """Return the codec of ``--compress`` for vectors of this layout, after a trial of a user-defined codec.

    Collective over ``comm``.

    Args:
        counts: Numbers of elements in the ranges that this rank encodes or decodes.

    Raises:
        ConfigError: On all ranks: ``--compress`` names a class that cannot be imported, that does not behave as a
            ``Codec`` must, or whose numbers of bytes differ by rank.
    """
    if not compression.is_class:
        return VectorCodec(make_codec(compression, dtype), layout.gaps())
    tried = sorted(set(_COUNTS).union(*comm.allgather(set(counts))))
    codec: Codec | None = None
    sizes, problem = [], ""
    try:
        codec = make_codec(compression, dtype)
        sizes = [_checked_size(codec, count) for count in tried]
        for count in tried:
            if count <= _MOST:
                try_codec(codec, count)
    except ConfigError as error:
        problem = str(error)
    _check_same(compression, tried, comm.allgather((problem, sizes)))
    assert codec is not None
    return VectorCodec(codec, layout.gaps())


def _check_same(compression: Compression, counts: Sequence[int], of_ranks: Sequence[tuple[str, list[int]]]) -> None:
    """Check that no rank has found a problem, and that all ranks encode to the same numbers of bytes.

    Raises:
        ConfigError: On all ranks: a rank has found a problem, or the numbers of bytes differ.
    """
    message = next((problem for problem, _ in of_ranks if problem), "")
    first = of_ranks[0][1]
    for rank, (_, sizes) in enumerate(of_ranks):
        if not message and sizes != first:
            count, a, b = next((c, a, b) for c, a, b in zip(counts, first, sizes, strict=True) if a != b)
            message = (
                f"--compress {compression}: nbytes({count}) is {a} on rank 0 and {b} on rank {rank}; it must depend on "
                "the number of elements alone"
            )
    if message:
        error = ConfigError(message)
        error.on_all_ranks = True
        raise error


def try_codec(codec: Codec, count: int) -> None:
    """Try a user-defined codec on a vector of ``count`` elements. Local.

    Raises:
        ConfigError: The codec fails or changes the vector, its size is not valid, or the residual is not the error.
    """
    name, shift = f"--compress {codec.compression}", codec.dtype.type(0.25)
    with _errors_of(codec, f"on a vector of {count:,} elements"):
        encoded = np.zeros(_checked_size(codec, count), np.uint8)
        exact = np.linspace(-1, 1, count, dtype=codec.dtype) ** 3
        vector, residual, decoded = exact.copy(), np.full_like(exact, shift), np.empty_like(exact)
        codec.encode(vector, residual, encoded)
        codec.decode(encoded, decoded)
    if not np.array_equal(vector, exact):
        raise ConfigError(f"{name}: encode changes vector; it must change residual and out only")
    if not np.allclose(decoded + residual, exact + shift, atol=1e-3):
        raise ConfigError(f"{name}: encode must set residual to vector + residual, minus what decode returns")


def _checked_size(codec: Codec, count: int) -> int:
    """Return ``codec.nbytes(count)``.

    Raises:
        ConfigError: It is not a non-negative multiple of 8.
    """
    with _errors_of(codec, f"in nbytes({count})"):
        nbytes: Any = codec.nbytes(count)
    try:
        size = operator.index(nbytes)
    except TypeError:
        size = -1
    if isinstance(nbytes, bool) or size < 0 or size % WORD:
        raise ConfigError(
            f"--compress {codec.compression}: nbytes({count}) is {nbytes!r}, must be a non-negative integer, a "
            f"multiple of {WORD}"
        )
    return size


@contextmanager
def _errors_of(codec: Codec, trial: str = "") -> Iterator[None]:
    """Convert an exception of a user-defined codec to a message of one line.

    Args:
        trial: Description of the test, for the message; empty during training.

    Raises:
        ConfigError: The block raised an exception.
    """
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        if not codec.compression.is_class:
            raise
        when = trial or f"after step {activity.completed_steps():,}"
        frame = traceback.extract_tb(error.__traceback__)[-1]
        why = f"{type(error).__name__}: {one_line(error)}"
        raise ConfigError(
            f"--compress {codec.compression}: the codec fails {when}: {why} ({frame.filename}, line {frame.lineno})"
        ) from error


@kernel
def _drop_non_finite(residual: Array) -> None:
    zero = residual.dtype.type(0)
    for i in range(residual.size):
        value = residual[i]
        residual[i] = value if value - value == zero else zero
