"""The layout of the flat vector."""

from __future__ import annotations

import numpy as np

from mpitrain.core.layout import ALIGN, Layout

DECLARED = [
    ("a.weight", (3, 5), "param"),
    ("a.mean", (5,), "state"),
    ("b.weight", (16,), "param"),
    ("b.bias", (), "param"),
    ("b.var", (1,), "state"),
]


def test_parameters_come_first_and_start_on_cache_lines() -> None:
    layout = Layout.pack(DECLARED)  # type: ignore[arg-type]
    assert [e.name for e in layout.entries] == ["a.weight", "b.weight", "b.bias", "a.mean", "b.var"]
    assert all(e.start % ALIGN == 0 for e in layout.entries)
    assert layout.n_trained == next(e.start for e in layout.entries if e.kind == "state")
    assert layout.n_params == 15 + 16 + 1
    for first, second in zip(layout.entries, layout.entries[1:], strict=False):
        assert first.stop <= second.start


def test_views_share_memory_and_cover_every_element_once() -> None:
    layout = Layout.pack(DECLARED)  # type: ignore[arg-type]
    flat = np.zeros(layout.size)
    for view in layout.views(flat).values():
        view += 1
    assert flat.sum() == sum(e.size for e in layout.entries)
    assert flat.max() == 1


def test_digests_differ_where_layouts_do() -> None:
    one = Layout.pack(DECLARED).digests()  # type: ignore[arg-type]
    other = Layout.pack([("a.weight", (5, 3), "param"), *DECLARED[1:]]).digests()  # type: ignore[arg-type]
    assert list((one != other).any(axis=1)) == [True, False, False, False, False]


def test_an_empty_model_has_an_empty_layout() -> None:
    layout = Layout.pack([])
    assert (layout.size, layout.n_params, layout.n_trained) == (0, 0, 0)
