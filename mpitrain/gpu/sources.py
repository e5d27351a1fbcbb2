"""CUDA sources as self-contained text, for a compiler without access to include files."""

from __future__ import annotations

from importlib import resources

NAMES = (
    "activation",
    "batch",
    "cast",
    "dropout",
    "embedding",
    "loss",
    "normalize",
    "optim",
    "pool",
    "step",
    "sum",
    "windows",
)

_INCLUDE = '#include "common.cuh"\n'


def text(name: str) -> str:
    """Return the source ``kernels/<name>.cu`` with the shared header inlined.

    CuPy caches compiled kernels by source text, so changes in an included file would go unnoticed.
    """
    folder = resources.files(__package__) / "kernels"
    before, _, after = (folder / f"{name}.cu").read_text().partition(_INCLUDE)
    lines = before.count("\n") + 2
    return f'{before}{(folder / "common.cuh").read_text()}#line {lines} "{name}.cu"\n{after}'
