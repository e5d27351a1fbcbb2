"""The text of the CUDA sources, as a compiler takes it that reads no other file."""

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
    """The source ``kernels/<name>.cu``, with what it shares with others in it.

    CuPy keeps compiled kernels by their source's text: a file that is only included could change unnoticed.
    """
    folder = resources.files(__package__) / "kernels"
    before, _, after = (folder / f"{name}.cu").read_text().partition(_INCLUDE)
    lines = before.count("\n") + 2
    return f'{before}{(folder / "common.cuh").read_text()}#line {lines} "{name}.cu"\n{after}'
