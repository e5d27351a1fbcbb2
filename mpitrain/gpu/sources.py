"""CUDA sources as self-contained text, for a compiler without access to include files."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import resources

# Types of stored values in CUDA sources, by their NumPy names.
STORED = {"float32": "float", "float64": "double", "float16": "Float16", "bfloat16": "Bfloat16"}
ALL, REALS = tuple(STORED.values()), ("float", "double")
# The types for which each source can be compiled.
TYPES = {
    "activation": ALL,
    "batch": ALL,
    "cast": ("float", "Float16", "Bfloat16"),
    "dropout": ALL,
    "embedding": ALL,
    "loss": ALL,
    "normalize": ALL,
    "optim": REALS,
    "step": REALS,
    "sum": REALS,
    "windows": ALL,
}

_SUMS = ("sum", "step")
_INCLUDE = '#include "common.cuh"\n'


def variants(dtypes: Iterable[str]) -> list[tuple[str, str]]:
    """Return the pairs (source, type) that a run needs whose parameters and activations have these dtypes."""
    used = {STORED[dtype] for dtype in dtypes}
    pairs = [(name, stored) for name, types in TYPES.items() for stored in types]
    # Sums of values of any type are double.
    return [(name, stored) for name, stored in pairs if stored in used or (stored == "double" and name in _SUMS)]


def text(name: str) -> str:
    """Return the source ``kernels/<name>.cu`` with the shared header inlined. Compile it with the macro STORED, a type.

    CuPy caches compiled kernels by source text, so changes in an included file would go unnoticed.
    """
    folder = resources.files(__package__) / "kernels"
    before, _, after = (folder / f"{name}.cu").read_text().partition(_INCLUDE)
    lines = before.count("\n") + 2
    return f'{before}{(folder / "common.cuh").read_text()}#line {lines} "{name}.cu"\n{after}'
