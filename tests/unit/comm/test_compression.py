"""Compressed gradients: they are rounded as the encoding requires, and what is lost is kept for the next gradient."""

from __future__ import annotations

import math
import re
from fractions import Fraction
from itertools import product
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from mpitrain.comm.compression import CODECS, Codec, make_codec as codec_of
from mpitrain.comm.vector_codec import VectorCodec, try_codec
from mpitrain.core.layout import Layout
from mpitrain.errors import ConfigError
from mpitrain.plan.compression import parse_compression

SIZE = (1 << 14) + 3
TYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
NARROWER = [("float32", np.float64), ("bfloat16", np.float32), ("bfloat16", np.float64), ("float16", np.float32)]


def make_codec(text: str, dtype: np.dtype) -> Codec:
    return codec_of(parse_compression(text), dtype)


def sent(codec: Codec, vector: np.ndarray, left: np.ndarray) -> np.ndarray:
    """Encode the vector and the residual ``left``, which changes; return what is decoded."""
    encoded, out = np.empty(codec.nbytes(len(vector)), np.uint8), np.empty_like(vector)
    codec.encode(vector, left, encoded)
    codec.decode(encoded, out)
    return out


def values(dtype: type) -> np.ndarray:
    rng = np.random.default_rng(0)
    return (rng.standard_normal(SIZE) * 10.0 ** rng.integers(-9, 4, SIZE)).astype(dtype)


@pytest.mark.parametrize(("precision", "dtype"), NARROWER)
def test_the_first_is_rounded_to_the_nearest(precision, dtype) -> None:
    vector = values(dtype)
    expected = vector.astype(np.float32).astype(TYPES[precision]).astype(dtype)
    np.testing.assert_array_equal(sent(make_codec(precision, np.dtype(dtype)), vector, np.zeros(SIZE, dtype)), expected)


@pytest.mark.parametrize("codec", ["int8", "int4", "bfloat16"])
def test_an_element_that_is_too_large_for_the_encoding_is_an_error(codec: str) -> None:
    with pytest.raises(ConfigError, match="1e\\+60"):
        sent(make_codec(codec, np.dtype(np.float64)), np.array([1, 1e60, 2]), np.zeros(3))


def test_halfway_between_two_the_even_one_is_taken() -> None:
    bits = np.array([0x3F808000, 0x3F818000, 0xBF808000, 0x3F808001], np.uint32)
    vector = bits.view(np.float32)
    found = sent(make_codec("bfloat16", np.dtype(np.float32)), vector, np.zeros(4, np.float32))
    assert [hex(b) for b in found.view(np.uint32)] == ["0x3f800000", "0x3f820000", "0xbf800000", "0x3f810000"]


@pytest.mark.parametrize(("precision", "dtype"), [*NARROWER, *product(("int8", "topk:0.02"), (np.float32, np.float64))])
def test_nothing_is_lost_over_many_steps(precision, dtype) -> None:
    """Some values are too small to change a larger value in a sum, and some cannot be represented in the encoding."""
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
    """Without the error, such a value would arrive as infinity, or would be clipped at every step."""
    vector = np.array([1, value, np.nan], dtype)
    with pytest.raises(ConfigError, match=f"--compress {precision}"):
        sent(make_codec(precision, np.dtype(dtype)), vector, np.zeros(3, dtype))


@pytest.mark.parametrize(("name", "largest"), [("int8", 127), ("int4", 7)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("size", [0, 1, 255, 256, 257, 1000])
def test_integers_are_rounded_to_nearest_in_groups(name: str, largest: int, dtype, size: int) -> None:
    rng = np.random.default_rng(size)
    vector = (rng.standard_normal(size) * 10.0 ** rng.integers(-6, 6, size)).astype(dtype)
    codec, left = make_codec(name, np.dtype(dtype)), np.zeros(size, dtype)
    assert codec.nbytes(size) <= size * (1 if largest == 127 else 0.5) + 4 * (size // 256 + 1) + 8
    received = sent(codec, vector, left)
    for start in range(0, size, 256):
        group, got = vector[start : start + 256], received[start : start + 256]
        assert np.abs(got - group).max() <= np.abs(group).max() / (2 * largest - 0.1)
    np.testing.assert_allclose(left, vector - received, rtol=0, atol=np.abs(vector).max(initial=0) * 1e-6)


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_integers_keep_apart_what_is_not_finite_and_what_is_too_small(name: str) -> None:
    vector = np.ones(1024, np.float32)
    vector[3], vector[300], vector[512:768] = np.nan, np.inf, 1e-38
    left = np.zeros(1024, np.float32)
    received = sent(make_codec(name, np.dtype(np.float32)), vector, left)
    assert np.isnan(received[:512]).all()
    assert not received[512:768].any()
    np.testing.assert_array_equal(left[512:768], vector[512:768])
    np.testing.assert_array_equal(received[768:], vector[768:])
    assert not left[:512].any()


@pytest.mark.parametrize(
    "text", ["", "int", "int8:3", "powersgd", "powersgd:0", "powersgd:-1", "topk:0", "topk:2", "a.b", ":C", "a:"]
)
def test_a_compression_that_does_not_exist_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--compress"):
        parse_compression(text)


@pytest.mark.parametrize("text", ["bfloat16", "float16", "int8", "int4", "powersgd:12", "topk:0.01", "my.module:Codec"])
def test_a_compression_is_what_its_text_says(text: str) -> None:
    assert str(parse_compression(text)) == text


@pytest.mark.parametrize("name", ["no_such_module:Codec", "math:pi", "mpitrain.errors:ConfigError", "math:none"])
def test_a_codec_of_the_user_must_be_one(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        make_codec(name, np.dtype(np.float32))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("size", "fraction"), [(0, 0.1), (1, 0.5), (1000, 0.01), (1003, 0.33), (50, 1)])
def test_topk_sends_the_largest(dtype, size: int, fraction: float) -> None:
    vector = np.random.default_rng(size).standard_normal(size).astype(dtype)
    codec, left = make_codec(f"topk:{fraction}", np.dtype(dtype)), np.zeros(size, dtype)
    received = sent(codec, vector, left)
    count = math.ceil(fraction * size)
    assert np.count_nonzero(received) == count
    assert codec.nbytes(size) <= (4 + vector.itemsize) * count + 16
    np.testing.assert_array_equal(received + left, vector)
    assert np.abs(left).max(initial=0) <= 1.07 * np.abs(received[received != 0]).min(initial=np.inf)


def test_topk_passes_on_what_is_not_finite() -> None:
    vector = np.array([1, np.nan, 2, -np.inf, 3, np.inf], np.float32)
    left = np.zeros(6, np.float32)
    received = sent(make_codec("topk:0.5", np.dtype(np.float32)), vector, left)
    np.testing.assert_array_equal(received, [0, np.nan, 0, -np.inf, 0, np.inf])
    np.testing.assert_array_equal(left, [1, 0, 2, 0, 3, 0])


class Faulty(Codec):
    """A codec with a mistake in one of its methods."""

    mistake = ""

    def nbytes(self, count: int) -> int:
        later = 8 if count > 1000 else 8 * count
        wrong = {"size": 4 * count + 4, "type": 8.0 * count, "later": later, "numpy": np.int64(8 * count)}
        return wrong.get(self.mistake, 8 * count)  # type: ignore[return-value]

    def encode(self, vector: np.ndarray, residual: np.ndarray, out: np.ndarray) -> None:
        if self.mistake == "raises":
            raise KeyError("mine")
        if self.mistake == "vector":
            vector += 1
        out.view(np.float64)[:] = vector + residual
        if self.mistake != "residual":
            residual[:] = np.nan if self.mistake == "nan" else 0

    def decode(self, encoded: np.ndarray, out: np.ndarray) -> None:
        out[:] = encoded.view(np.float64) + (self.mistake == "gaps")


def faulty(mistake: str, monkeypatch: pytest.MonkeyPatch) -> Codec:
    monkeypatch.setattr(Faulty, "mistake", mistake)
    return make_codec(f"{__name__}:Faulty", np.dtype(np.float32))


@pytest.mark.parametrize("mistake", ["size", "type", "raises", "residual", "vector", "later"])
def test_mistakes_of_a_codec_of_the_user_are_found(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    try_codec(faulty("", monkeypatch), 1003)
    with pytest.raises(ConfigError, match="Faulty"):
        try_codec(faulty(mistake, monkeypatch), 1003)


def test_numbers_of_bytes_may_be_integers_of_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    try_codec(faulty("numpy", monkeypatch), 1003)


def test_gaps_stay_zero_and_have_no_residual(monkeypatch: pytest.MonkeyPatch) -> None:
    """A codec may decode zero to another value."""
    layout = Layout.pack([("a", (3,), "param"), ("b", (20,), "param"), ("c", (2,), "state")])
    codec = VectorCodec(faulty("gaps", monkeypatch), layout.gaps()).part(1, 60).of_range(15, 50)
    vector, residual, encoded = np.ones(35, np.float32), np.ones(35, np.float32), np.zeros(codec.nbytes, np.uint8)
    codec.encode(vector, residual, encoded)
    codec.decode(encoded, vector)
    is_parameter = np.zeros(layout.size, bool)
    for entry in layout.entries:
        is_parameter[entry.start : entry.stop] = True
    np.testing.assert_array_equal(vector, np.where(is_parameter[16:51], 3, 0))
    assert not residual.any()


def test_no_residual_is_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    codec = VectorCodec(faulty("nan", monkeypatch), Layout.pack([]).gaps()).of_range(0, 5)
    residual = np.ones(5, np.float32)
    codec.encode(np.ones(5, np.float32), residual, np.zeros(codec.nbytes, np.uint8))
    assert not residual.any()


def test_errors_of_a_codec_during_training_name_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    codec = VectorCodec(faulty("raises", monkeypatch), Layout.pack([]).gaps()).of_range(0, 5)
    vector = np.ones(5, np.float32)
    with pytest.raises(ConfigError, match=r"KeyError.*test_compression\.py"):
        codec.encode(vector, vector, np.zeros(codec.nbytes, np.uint8))


def test_the_page_has_all_codecs_with_their_sizes() -> None:
    page = (Path(__file__).parents[3] / "docs" / "slow_networks.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| (`.*?) \| .*? \| (.*?) \|$", page.split("| `--compress` |")[1].split("\n\n")[0], re.MULTILINE
    )
    sizes: dict[str, set[str]] = {}
    for names, row_sizes in rows:
        for group, size in zip(names.split("; "), row_sizes.split("; "), strict=False):
            for name in re.findall(r"`(\w+)[:`]", group):
                sizes.setdefault(name, set()).add(size.split()[0].rstrip(":"))
    assert CODECS.keys() | {"float32"} <= sizes.keys()
    for name in ("bfloat16", "float16", "int8", "int4"):
        codec = make_codec(name, np.dtype(np.float32))
        relative = codec.nbytes(1 << 20) / (4 << 20)
        assert {round(float(Fraction(size)), 3) for size in sizes[name]} == {round(relative, 3)}
