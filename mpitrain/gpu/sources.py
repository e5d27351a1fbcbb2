"""CUDA sources as self-contained text, for a compiler without access to include files."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import resources

from ..core.ops.activations import ACTIVATIONS
from ..optim.compiled import RULES, SLOTS, CompiledRule

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
_FOLDER = resources.files(__package__) / "kernels"
_INCLUDE = '#include "common.cuh"\n'


def variants(dtypes: Iterable[str]) -> list[tuple[str, str]]:
    """Return the pairs (source, type) that a run needs whose parameters and activations have these dtypes."""
    used = {STORED[dtype] for dtype in dtypes}
    pairs = [(name, stored) for name, types in TYPES.items() for stored in types]
    # Sums of values of any type are double.
    return [(name, stored) for name, stored in pairs if stored in used or (stored == "double" and name in _SUMS)]


def source(name: str) -> str:
    """Return the source ``kernels/<name>.cu``.

    ``activation`` begins with an enumeration of all kinds, ``kRelu`` and others; ``optim`` ends with the rules of all
    optimizers.
    """
    kinds = ", ".join("k" + kind.title().replace("_", "") for kind in ACTIVATIONS)
    before = f"enum Activation {{ {kinds} }};  " if name == "activation" else ""
    rules = "".join(map(_rule, RULES.values())) if name == "optim" else ""
    return before + (_FOLDER / f"{name}.cu").read_text() + rules


def text(name: str) -> str:
    """Return a source with the shared header inlined. Compile the source with the macro STORED, a type.

    CuPy caches compiled kernels by source text, so changes in an included file would go unnoticed.
    """
    before, _, after = source(name).partition(_INCLUDE)
    lines = before.count("\n") + 2
    return f'{before}{(_FOLDER / "common.cuh").read_text()}#line {lines} "{name}.cu"\n{after}'


def _rule(rule: CompiledRule) -> str:
    """Return a rule as a C++ type, with its kernels."""
    constants = [f"{name}(c.c{index})" for index, name in enumerate(rule.constants)]
    slots = [f"T& {name}" for name in (*rule.slots, *[""] * (SLOTS - len(rule.slots)))]
    return f"""
struct Rule_{rule.name} {{
    static constexpr int slots = {len(rule.slots)};
    T {", ".join(rule.constants)};
    __device__ explicit Rule_{rule.name}(Constants c) : {", ".join(constants)} {{}}
    __device__ __forceinline__ void operator()(T& p, T g, {", ".join(slots)}) const {{ {rule.text} }}
    __device__ __forceinline__ T direction(T g, T p, T decay, T& slot0, T& slot1) const {{
        T step = 0;
        (*this)(step, g, slot0, slot1);
        return decay * p - step;
    }}
}};
RULE({rule.name}, Rule_{rule.name})
"""
