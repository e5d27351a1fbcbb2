"""A user's own codec: it sends vectors unchanged."""

from __future__ import annotations

from mpitrain.comm.compression import Codec
from mpitrain.core.layout import Array


class Identity(Codec):
    def nbytes(self, count: int) -> int:
        return (count * self.dtype.itemsize + 7) // 8 * 8

    def encode(self, vector: Array, residual: Array, out: Array) -> None:
        out.view(self.dtype)[: len(vector)] = vector + residual
        residual[:] = 0

    def decode(self, encoded: Array, out: Array) -> None:
        out[:] = encoded.view(self.dtype)[: len(out)]
