"""User-defined codecs: one sends vectors unchanged, others have faults or special properties."""

from __future__ import annotations

import numpy as np

from mpitrain.comm.compression import Codec
from mpitrain.comm.mpi import MPI
from mpitrain.core.layout import Array


class Identity(Codec):
    def nbytes(self, count: int) -> int:
        return (count * self.dtype.itemsize + 7) // 8 * 8

    def encode(self, vector: Array, residual: Array, out: Array) -> None:
        out.view(self.dtype)[: len(vector)] = vector + residual
        residual[:] = 0

    def decode(self, encoded: Array, out: Array) -> None:
        out[:] = encoded.view(self.dtype)[: len(out)]


class UnequalBytes(Identity):
    """Sends more bytes on higher ranks."""

    def nbytes(self, count: int) -> int:
        return super().nbytes(count) + 8 * MPI.COMM_WORLD.rank


class Signs(Codec):
    """Sends the sign of each element, and the mean magnitude, so that zero decodes to another value."""

    def nbytes(self, count: int) -> int:
        return 8 + (count + 63) // 64 * 8

    def encode(self, vector: Array, residual: Array, out: Array) -> None:
        residual += vector
        scale = np.abs(residual).mean() if len(vector) else 0.0
        out[:8].view(np.float64)[0] = scale
        signs = np.packbits(residual >= 0)
        out[8 : 8 + len(signs)] = signs
        residual -= np.where(residual >= 0, scale, -scale)

    def decode(self, encoded: Array, out: Array) -> None:
        scale, signs = encoded[:8].view(np.float64)[0], np.unpackbits(encoded[8:], count=len(out))
        out[:] = np.where(signs, scale, -scale)
