"""Compares operations on a device with those on the CPU; makes random arrays for the operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from mpitrain.core import ops
from mpitrain.gpu import ops as launch
from mpitrain.gpu.ops import updates

RELATIVE = {"float32": 1e-5, "float64": 1e-12}
DTYPES = [np.float32, np.float64]
SIZES = [1, 3, 31, 257, 5000]
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "float64"])
NARROW = [np.float16, ml_dtypes.bfloat16]
each_narrow = pytest.mark.parametrize("dtype", NARROW, ids=["float16", "bfloat16"])
each_stored = pytest.mark.parametrize("dtype", [*DTYPES, *NARROW], ids=lambda dtype: np.dtype(dtype).name)
WHOLE = [np.uint8, np.int64, np.uint64]
EPSILON = {**RELATIVE, "float16": 2**-10, "bfloat16": 2**-7}


BUFFER = "buffer"  # as the last argument: stands for a function that makes arrays with the first argument's dtype


@dataclass
class Device:
    """The device on which the launch functions run.

    Attributes:
        places: Arguments for ``launch.use``; the results must be bit-identical for all of them.
        put: Copies an array to the device, to an address that is a given number of elements after an aligned address.
        get: Copies an array from the device.
    """

    places: Sequence[Any]
    put: Callable[[np.ndarray, int], Any]
    get: Callable[[Any], np.ndarray]

    def run(self, name: str, arguments: Sequence[Any], shift: int = 0) -> list[Any]:
        """Call a launch function; return its result, if any, and the arguments that are arrays, after the call.

        Args:
            shift: Number of elements from an aligned address to the beginning of arrays.
        """
        runs = [self._run(place, name, arguments, shift) for place in self.places]
        for other in runs[1:]:
            for one, two in zip(runs[0], other, strict=True):
                assert one is two is None or one.tobytes() == two.tobytes(), "two runs differ"
        return runs[0]

    def _run(self, place: Any, name: str, arguments: Sequence[Any], shift: int) -> list[Any]:
        launch.use(place)
        moved = [self.put(a, shift) if isinstance(a, np.ndarray) else a for a in arguments]
        if arguments[-1] is BUFFER:
            dtype = arguments[0].dtype
            moved[-1] = lambda tag, shape: self.put(np.zeros(shape, dtype), shift)
        operation = getattr(launch, name, None) or getattr(updates, name)
        result = operation(*moved)
        results = [] if result is None else result if isinstance(result, tuple) else [result]
        arrays = [a for a, given in zip(moved, arguments, strict=True) if isinstance(given, np.ndarray)]
        return [None if a is None else self.get(a) for a in (*results, *arrays)]

    def check(self, name: str, *arguments: Any, shift: int = 0) -> None:
        """Compare the result and the arrays with those of the CPU's operation."""
        found = self.run(name, arguments, shift)
        copies = [a.copy() if isinstance(a, np.ndarray) else a for a in arguments]
        result = getattr(ops, name)(*copies)
        expected = ([] if result is None else [np.array(result, np.float64)]) + [
            a for a in copies if isinstance(a, np.ndarray)
        ]
        dtypes = {a.dtype.name for a in expected}
        relative = RELATIVE["float32" if any(a.dtype == np.float32 for a in copies if is_array(a)) else "float64"]
        assert dtypes
        for one, two in zip(found, expected, strict=True):
            assert one.shape == two.shape and one.dtype == two.dtype
            size = np.abs(two[np.isfinite(two)]).max(initial=0) if two.dtype.kind == "f" else 0
            np.testing.assert_allclose(one, two, rtol=relative, atol=relative * size)

    def check_narrow(self, name: str, *arguments: Any) -> None:
        """Compare with the CPU's operation if arguments have 16-bit types; the CPU gets their values as float64."""
        found = self.run(name, arguments)
        dtypes = [a.dtype for a in arguments if is_array(a)]
        wide = [a.astype(np.float64) if is_array(a) and a.dtype not in WHOLE else a for a in arguments]
        result = getattr(ops, name)(*wide)
        expected = [a for a in wide if is_array(a)]
        if result is not None:
            dtypes, expected = [np.dtype(np.float32), *dtypes], [np.array(result, np.float64), *expected]
        for one, two, dtype in zip(found, expected, dtypes, strict=True):
            if dtype in WHOLE:
                np.testing.assert_array_equal(one, two)
            else:
                assert_near(one, two, np.float32 if dtype == np.float64 else dtype)


def assert_near(found: np.ndarray, expected: np.ndarray, dtype: Any) -> None:
    """Check that values agree within the type's precision, and are NaN where NaN is expected."""
    epsilon = EPSILON[np.dtype(dtype).name]
    largest = np.abs(expected[np.isfinite(expected)]).max(initial=0)
    np.testing.assert_allclose(found.astype(np.float64), expected, rtol=epsilon, atol=min(epsilon, 1e-2) * largest)


def is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray)


def draw(shape: Any, dtype: Any, seed: int = 0, special: bool = False) -> np.ndarray:
    """Return normally distributed numbers; if ``special``, some are NaN, infinite or zero."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(shape).astype(dtype)
    if special:
        flat = values.reshape(-1)
        some = rng.permutation(flat.size)[: flat.size // 10 + 1]
        flat[some] = rng.choice([np.nan, np.inf, -np.inf, 0.0, -0.0], len(some))
    return values
