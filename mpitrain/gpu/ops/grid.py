"""Grid and block sizes for kernels, and their launch.

If blocks compute parts of a sum, their number depends only on shapes (``shares``, ``SUM_BLOCKS``), because it
determines the order of summation. All other grids have at most as many blocks as the GPU runs at once, because any
further block starts only when another block ends.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple, Protocol

import numpy as np

from ...core.layout import Array, Shape
from ..sources import STORED

Pair = tuple[int, int]

THREADS = 256
WARP = 32
LINES = THREADS // WARP
SUM_BLOCKS = 132 * 8  # maximum number of blocks that compute parts of a sum; the same on every GPU
_PARTS = 264  # maximum number of blocks that share a sum over rows; another kernel adds their parts
_TEAM_COLUMNS = 1024  # longer rows are handled by a whole block

KINDS = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float32", "float64")


class Kernel(NamedTuple):
    """The kernel ``<name>_<stored>`` of ``kernels/<source>.cu``, compiled for values stored as the type ``stored``."""

    source: str
    name: str
    stored: str


class Kernels(Protocol):
    """Compiles and launches kernels."""

    def empty(self, shape: Shape, dtype: Any) -> Array:
        """Return uninitialized device memory."""

    def launch(self, kernel: Kernel, grid: Pair, block: Pair, arguments: tuple[Any, ...]) -> None:
        """Launch a kernel; ``arguments`` have the exact types of its parameters."""

    def resident_blocks(self, kernel: Kernel) -> int:
        """Return the number of blocks of ``THREADS`` threads that the current device runs at once."""


_kernels: Kernels


def use(kernels: Kernels) -> None:
    """Use ``kernels`` for every launch in this process. Local."""
    global _kernels
    _kernels = kernels


def empty(shape: Shape, dtype: Any) -> Array:
    """Return uninitialized device memory."""
    return _kernels.empty(shape, dtype)


def flat(source: str, name: str, typed: Array, n: int, arguments: tuple[Any, ...]) -> None:
    """Launch a 1-D grid for ``n`` elements, 16 bytes per thread; no sums over blocks."""
    line(kernel(source, name, typed), -(-n * typed.itemsize // 16), THREADS, arguments)


def line(kernel: Kernel, work: int, at_once: int, arguments: tuple[Any, ...]) -> None:
    """Launch a 1-D grid for ``work`` items, of which a block handles ``at_once`` at a time; no sums over blocks."""
    if work:
        down = min(_kernels.resident_blocks(kernel), -(-work // at_once))
        begin(kernel, (down, 1), (THREADS, 1), arguments)


def cells(source: str, name: str, typed: Array, rows: int, columns: int, arguments: tuple[Any, ...]) -> None:
    """Launch a warp per 32 adjacent columns of a row, or fewer warps that loop; no sums over blocks."""
    if rows and columns:
        chosen = kernel(source, name, typed)
        grid = balanced(-(-rows // LINES), -(-columns // WARP), _kernels.resident_blocks(chosen))
        begin(chosen, grid, (WARP, LINES), arguments)


def balanced(down: int, across: int, most: int) -> Pair:
    """Return a grid of at most ``most`` blocks for ``down`` by ``across`` tiles, with the fewest tiles per block."""
    widths = {min(1 << bits, across, most) for bits in range(across.bit_length() + 1)}
    grids = [(min(down, most // width), width) for width in sorted(widths)]
    return min(grids, key=lambda grid: -(-down // grid[0]) * -(-across // grid[1]))


def rows_of_packs(source: str, name: str, matrix: Array, pack: int, arguments: tuple[Any, ...]) -> None:
    """Launch threads that handle the same ``pack`` adjacent columns of several rows; no sums over blocks."""
    if matrix.size:
        chosen = kernel(source, name, matrix)
        tiles, block = pack_tiles(matrix, pack)
        down = min(max(1, _kernels.resident_blocks(chosen) // tiles), -(-len(matrix) // block[1]))
        begin(chosen, (tiles, down), block, arguments)


def pack_tiles(matrix: Array, pack: int) -> tuple[int, Pair]:
    """Return the number of blocks that cover all columns of a matrix, and the block size; see ``packs_of``."""
    packs = packs_of(matrix.shape[1], pack)
    across = min(WARP, 1 << (packs - 1).bit_length())
    return -(-packs // across), (across, THREADS // across)


def packs_of(columns: int, pack: int) -> int:
    """Return the number of packs in a row: of ``pack`` columns, or of 1 column if ``pack`` does not divide the row."""
    return columns // pack if columns % pack == 0 else columns


def teams(source: str, name: str, matrix: Array, arguments: tuple[Any, ...]) -> None:
    """Launch a warp per row, or a block per row if rows are long; no sums over blocks."""
    if len(matrix):
        chosen = kernel(source, name, matrix)
        grid, block = team_grid(matrix, _kernels.resident_blocks(chosen))
        begin(chosen, grid, block, arguments)


def team_grid(matrix: Array, most: int) -> tuple[Pair, Pair]:
    """Return a grid of at most ``most`` blocks, and the block size, for a team of threads per row."""
    rows, columns = matrix.shape
    at_once = 1 if columns > _TEAM_COLUMNS else LINES
    return (max(1, min(most, -(-rows // at_once))), 1), (THREADS // at_once, at_once)


def sum_columns(name: str, matrix: Array, pack: int, inputs: tuple[Array, ...], sums: Array) -> None:
    """Set ``sums`` to two sums per column: each block sums its rows, and another kernel adds the blocks' results."""
    rows, columns = matrix.shape
    tiles, block = pack_tiles(matrix, pack)
    shared = shares(rows, block[1], tiles)
    parts = empty((shared, 2 * columns), np.float64)
    sizes = int64(rows), int32(columns)
    begin(kernel("normalize", name, matrix), (tiles, shared), block, (*inputs, *sizes, parts))
    add_columns(parts, sums)


def shares(rows: int, at_once: int, tiles: int) -> int:
    """Return the number of blocks that share the rows of a tile of columns; each handles ``at_once`` rows at a time."""
    return max(1, min(_PARTS, SUM_BLOCKS // tiles, -(-rows // (4 * at_once))))


def add_columns(parts: Array, sums: Array) -> None:
    """Set ``sums``, of any shape, to the sums of the columns of ``parts``, float64."""
    count, columns = parts.shape
    arguments = (parts, int32(count), int32(columns), sums)
    begin(kernel("sum", "add_columns", sums), (-(-columns // WARP), 1), (WARP, LINES), arguments)


def begin(kernel: Kernel, grid: Pair, block: Pair, arguments: tuple[Any, ...]) -> None:
    """Launch a kernel; its arrays must be C-contiguous."""
    for argument in arguments:
        if not isinstance(argument, np.generic):  # scalars are contiguous; to read their flags takes long
            assert argument.flags.c_contiguous, f"{kernel.name} takes C-contiguous arrays"
    _kernels.launch(kernel, grid, block, arguments)


def kernel(source: str, name: str, typed: Array) -> Kernel:
    """Return the kernel for the type of an array."""
    return Kernel(source, name, _stored(typed.dtype))


@cache
def _stored(dtype: np.dtype[Any]) -> str:
    return STORED[dtype.name]


def real(stored: Array) -> type[np.floating[Any]]:
    """Return the type of scalars, parameters and parameter gradients that belong to an array of activations."""
    return np.float64 if stored.dtype == np.float64 else np.float32


def numeric_kind(values: Array) -> np.int32:
    """Return the index of a numeric type, as in common.cuh; a bool is stored as a uint8."""
    return _kind(values.dtype)


@cache
def _kind(dtype: np.dtype[Any]) -> np.int32:
    return np.int32(KINDS.index("uint8" if dtype == np.bool_ else dtype.name))


def or_null(vector: Array | None) -> Array | np.uint64:
    """Return a null pointer for None, and for an empty vector, whose own pointer is unspecified."""
    return np.uint64(0) if vector is None or not vector.size else vector


def int32(value: int) -> np.int32:
    assert value < 2**31
    return np.int32(value)


def int64(value: int) -> np.int64:
    return np.int64(value)
