"""Texts of losses, which do not depend on the process, the host, paths or devices."""

from __future__ import annotations

import functools
import hashlib
import inspect
import os
import re
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import numpy as np

from ..core.layout import Array
from ..nn.loss import Loss

# The name of what ``code_of`` returns: only the code of the same Python can be compared.
CODE = f"the code of the loss, compiled by {sys.implementation.cache_tag}{'-O' * sys.flags.optimize}"
_DEVICE = re.compile(r"cpu|mps|cuda(:\d+)?")


class _Part(NamedTuple):
    name: str
    text: str
    functions: tuple[FunctionType, ...] = ()


def values_of(loss: object) -> str:
    """Return the kind of a loss, and the values on which it depends, by name, as far as they are known.

    These are the attributes of an object; and the defaults of a function, and the values that it encloses.
    """
    return ", ".join(f"{part.name}={part.text}" if part.name else part.text for part in _parts(loss))


def code_of(loss: object) -> str:
    """Return a digest of the code of the functions that ``values_of`` finds, but for that of installed packages."""
    codes = [_code(each.__code__) for part in _parts(loss) for each in part.functions if _is_own(each)]
    return hashlib.sha256(repr(codes).encode()).hexdigest()[:16]


def _parts(value: Any, name: str = "", outer: tuple[int, ...] = ()) -> Iterator[_Part]:
    value = getattr(value, "_orig_mod", value)  # what ``torch.compile`` was called with
    value = inspect.unwrap(value) if isinstance(value, FunctionType) else value
    if id(value) in outer:
        return
    inner: dict[Any, Any] = {}
    if isinstance(value, str) and (os.path.isabs(value) or _DEVICE.fullmatch(value)):
        return
    if value is None or isinstance(value, (int, str)):
        yield _Part(name, repr(value))
    elif isinstance(value, float):
        yield _Part(name, f"{value:.6g}")
    elif hasattr(value, "tolist"):  # an array or a tensor
        yield _Part(name, _summary(value))
    elif isinstance(value, (dict, list, tuple)):
        inner = dict(value if isinstance(value, dict) else enumerate(value))
    elif isinstance(value, functools.partial):
        inner = {"function": value.func, **dict(enumerate(value.args)), **value.keywords}
    elif isinstance(value, FunctionType):
        yield _Part(name, value.__name__, (value,))
        inner = _enclosed(value)
    elif inspect.ismethod(value):
        inner = {"function": value.__func__, **_attributes(value.__self__)}
    else:
        methods = [getattr(type(value), each, None) for each in ("__call__", "forward", "evaluate")]
        yield _Part(name, type(value).__name__, tuple(each for each in methods if isinstance(each, FunctionType)))
        if not outer or isinstance(value, Loss) or hasattr(value, "named_buffers"):
            inner = _attributes(value)
    for key in sorted(inner, key=str):
        yield from _parts(inner[key], f"{name}.{key}" if name else str(key), (*outer, id(value)))


def _attributes(value: object) -> dict[str, Any]:
    """Return the attributes of an object, except those of every ``Loss``, which depend on the device."""
    own = dict(getattr(value, "__dict__", {}))
    own |= own.get("_buffers", {}) | own.get("_modules", {})  # parameters may be trained already
    return {name: each for name, each in own.items() if not name.startswith("_") and not hasattr(Loss, name)}


def _enclosed(function: FunctionType) -> dict[str, Any]:
    """Return the defaults of a function, and the values that it encloses."""
    code = function.__code__
    last = code.co_varnames[: code.co_argcount][::-1]
    defaults = dict(zip(last, (function.__defaults__ or ())[::-1], strict=False))
    cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
    enclosed = {name: cell.cell_contents for name, cell in cells if cell != type(cell)()}  # it may be empty
    return defaults | (function.__kwdefaults__ or {}) | enclosed


def _summary(value: Any) -> str:
    """Return a text that is the same for arrays or tensors which differ by rounding."""
    try:
        array: Array = np.array(value.tolist())
    except (RuntimeError, TypeError, ValueError):  # a sparse tensor, or lists of several lengths
        return f"{type(value).__name__} of shape {tuple(value.shape)}"
    if array.dtype.kind not in "biuf" or not array.size:
        return f"array of shape {array.shape}"
    flat = array.ravel().astype(np.float64)
    return f"array of shape {array.shape}, mean {flat.mean():.3g}, {(flat * np.arange(1, flat.size + 1)).mean():.3g}"


def _is_own(function: FunctionType) -> bool:
    """Return whether a function is not part of an installed package: a host may have another version of it."""
    file, library = Path(function.__code__.co_filename), sysconfig.get_path("stdlib")
    installed = {"site-packages", "dist-packages"}.intersection(file.parts) or file.is_relative_to(library)
    return not installed and not (function.__module__ or "").startswith(("mpitrain.", "torch."))


def _code(code: CodeType) -> tuple[object, ...]:
    constants = [
        _code(each) if isinstance(each, CodeType) else sorted(map(repr, each)) if isinstance(each, frozenset) else each
        for each in code.co_consts
    ]
    return code.co_code, code.co_names, code.co_varnames, code.co_freevars, constants
