"""Grid and block sizes for kernels, and their launch."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from ...core.layout import Array, Shape

Pair = tuple[int, int]

THREADS = 256
WARP = 32
LINES = THREADS // WARP
BLOCKS = 132 * 8  # the most that the largest GPU, an H100, runs at once; more would only start later
_PARTS = 264  # blocks that share a sum over rows; each writes a part, and one more kernel adds the parts
_TEAM_COLUMNS = 1024  # longer rows are handled by a whole block

KINDS = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float32", "float64")
_STORED = {"float32": "float", "float64": "double", "float16": "Float16", "bfloat16": "Bfloat16"}


class Kernels(Protocol):
    """Compiles and launches kernels."""

    def empty(self, shape: Shape, dtype: Any) -> Array:
        """Return uninitialized device memory."""

    def launch(self, source: str, name: str, grid: Pair, block: Pair, arguments: tuple[Any, ...]) -> None:
        """Launch a kernel of ``kernels/<source>.cu``; ``arguments`` have the exact types of its parameters."""


_kernels: Kernels


def use(kernels: Kernels) -> None:
    """Use ``kernels`` for every launch in this process. Local."""
    global _kernels
    _kernels = kernels


def empty(shape: Shape, dtype: Any) -> Array:
    """Return uninitialized device memory."""
    return _kernels.empty(shape, dtype)


def flat(source: str, name: str, typed: Array, n: int, arguments: tuple[Any, ...]) -> None:
    """Launch a line of threads for ``n`` elements, each handling 16 bytes."""
    if n:
        packs = -(-n * typed.itemsize // 16)
        begin(source, named(name, typed), (blocks(packs, THREADS), 1), (THREADS, 1), arguments)


def cells(source: str, name: str, typed: Array, rows: int, columns: int, arguments: tuple[Any, ...]) -> None:
    """Launch a warp per 32 adjacent columns of a row; a warp handles more columns if there are many."""
    if rows and columns:
        down = blocks(rows, LINES)
        across = max(1, min(BLOCKS // down, -(-columns // WARP)))
        begin(source, named(name, typed), (down, across), (WARP, LINES), arguments)


def teams(source: str, name: str, matrix: Array, arguments: tuple[Any, ...]) -> None:
    """Launch a warp per row, or a block per row if rows are long."""
    if len(matrix):
        grid, block = team_grid(matrix)
        begin(source, named(name, matrix), grid, block, arguments)


def team_grid(matrix: Array) -> tuple[Pair, Pair]:
    rows, columns = matrix.shape
    if columns > _TEAM_COLUMNS:
        return (blocks(rows, 1), 1), (THREADS, 1)
    return (blocks(rows, LINES), 1), (WARP, LINES)


def blocks(work: int, at_once: int) -> int:
    return max(1, min(BLOCKS, -(-work // at_once)))


def sum_columns(name: str, matrix: Array, inputs: tuple[Array, ...], sums: Array) -> None:
    """Compute two sums per column, in ``sums``: blocks sum their rows, and one more kernel adds the results."""
    rows, columns = matrix.shape
    tiles = -(-columns // WARP)
    shared = shares(rows, LINES, tiles)
    parts = empty((shared, 2 * columns), np.float64)
    sizes = int64(rows), int32(columns)
    begin("normalize", named(name, matrix), (tiles, shared), (WARP, LINES), (*inputs, *sizes, parts))
    add_columns(parts, sums)


def shares(rows: int, at_once: int, tiles: int) -> int:
    """Return the number of blocks that share the rows of a tile of columns, ``at_once`` rows at a time."""
    return max(1, min(_PARTS, BLOCKS // tiles, -(-rows // (4 * at_once))))


def add_columns(parts: Array, sums: Array) -> None:
    """Set ``sums``, of any shape, to the sums of the columns of ``parts``, float64."""
    count, columns = parts.shape
    arguments = (parts, int32(count), int32(columns), sums)
    begin("sum", named("add_columns", sums), (-(-columns // WARP), 1), (WARP, LINES), arguments)


def begin(source: str, name: str, grid: Pair, block: Pair, arguments: tuple[Any, ...]) -> None:
    for argument in arguments:
        assert not hasattr(argument, "flags") or argument.flags.c_contiguous, f"{name} takes C-contiguous arrays"
    _kernels.launch(source, name, grid, block, arguments)


def real(stored: Array) -> type[np.floating[Any]]:
    """Return the type of scalars, parameters and parameter gradients that belong to an array of activations."""
    return np.float64 if stored.dtype == np.float64 else np.float32


def named(name: str, typed: Array) -> str:
    return f"{name}_{_STORED[typed.dtype.name]}"


def numeric_kind(values: Array) -> np.int32:
    """Return the index of a numeric type, as in common.cuh; a bool is stored as a uint8."""
    return np.int32(KINDS.index("uint8" if values.dtype == np.bool_ else values.dtype.name))


def or_null(vector: Array | None) -> Array | np.uint64:
    """Return a null pointer for None, and for an empty vector, whose own pointer is unspecified."""
    return np.uint64(0) if vector is None or not vector.size else vector


def int32(value: int) -> np.int32:
    assert value < 2**31
    return np.int32(value)


def int64(value: int) -> np.int64:
    return np.int64(value)
