"""Gradients in 16 bits: rounded as the types say, and nothing of them lost for good."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from mpitrain.comm.compression import Codec, make_codec
from mpitrain.errors import ConfigError

SIZE = (1 << 14) + 3
TYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
NARROWER = [("float32", np.float64), ("bfloat16", np.float32), ("bfloat16", np.float64), ("float16", np.float32)]


def sent(codec: Codec, vector: np.ndarray, left: np.ndarray) -> np.ndarray:
    """What arrives of a vector."""
    wire, out = np.empty(len(vector), codec.wire), np.empty_like(vector)
    codec.encode(vector, left, wire)
    codec.decode(wire, out)
    return out


def values(dtype: type) -> np.ndarray:
    rng = np.random.default_rng(0)
    return (rng.standard_normal(SIZE) * 10.0 ** rng.integers(-9, 4, SIZE)).astype(dtype)


@pytest.mark.parametrize(("precision", "dtype"), NARROWER)
def test_the_first_is_rounded_to_the_nearest(precision, dtype) -> None:
    vector = values(dtype)
    expected = vector.astype(np.float32).astype(TYPES[precision]).astype(dtype)
    np.testing.assert_array_equal(sent(make_codec(precision, np.dtype(dtype)), vector, np.zeros(SIZE, dtype)), expected)


def test_halfway_between_two_the_even_one_is_taken() -> None:
    bits = np.array([0x3F808000, 0x3F818000, 0xBF808000, 0x3F808001], np.uint32)
    vector = bits.view(np.float32)
    found = sent(make_codec("bfloat16", np.dtype(np.float32)), vector, np.zeros(4, np.float32))
    assert [hex(b) for b in found.view(np.uint32)] == ["0x3f800000", "0x3f820000", "0xbf800000", "0x3f810000"]


@pytest.mark.parametrize(("precision", "dtype"), NARROWER)
def test_nothing_is_lost_over_many_steps(precision, dtype) -> None:
    """Not of what is far below the last digit of what it is added to, nor of what has no digit in the type at all."""
    codec, left = make_codec(precision, np.dtype(dtype)), np.zeros(SIZE, dtype)
    total, arrived = np.zeros(SIZE), np.zeros(SIZE)
    for step in range(50):
        vector = values(dtype) * dtype(1 + step % 3)
        total += vector
        arrived += sent(codec, vector, left)
    np.testing.assert_allclose(arrived + left, total, rtol=1e-4 if dtype == np.float32 else 1e-12)


@pytest.mark.parametrize(("precision", "dtype"), NARROWER)
def test_what_is_not_finite_arrives_and_leaves_no_trace(precision, dtype) -> None:
    codec, left = make_codec(precision, np.dtype(dtype)), np.full(3, 1e-3, dtype)
    bad = np.array([np.nan, np.inf, -np.inf], dtype)
    np.testing.assert_array_equal(sent(codec, bad, left), bad)
    assert not left.any()


@pytest.mark.parametrize(
    ("precision", "dtype", "value"),
    [
        ("float16", np.float32, 7e4),
        ("float16", np.float64, -1e9),
        ("bfloat16", np.float32, 3.4e38),
        ("float32", np.float64, 1e39),
    ],
)
def test_what_is_too_large_is_reported(precision, dtype, value: float) -> None:
    """It would arrive as infinity, or cut off at every step."""
    vector = np.array([1, value, np.nan], dtype)
    with pytest.raises(ConfigError, match=f"--push-precision {precision}"):
        sent(make_codec(precision, np.dtype(dtype)), vector, np.zeros(3, dtype))
