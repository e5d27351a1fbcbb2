"""Manifests with valid digests and invalid content."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpitrain.checkpoint.digest import digest_of

from .sealing import Recipe, seal, seal_text

_SIZE = 48_000
CONTENTS: dict[str, Mapping[str, Any]] = {
    "no arrays": {"arrays": None},
    "list of arrays": {"arrays": []},
    "array of text": {"arrays": {"a": "text"}},
    "array of nothing": {"arrays": {"a": []}},
    "array of a list": {"arrays": {"a": [[]]}},
    "array of numbers": {"arrays": {"a": [1, 2, 3]}},
    "array of another name": {"arrays": {"a\x1b": [_SIZE - 4, _SIZE, digest_of(b"")]}},
    "text of bytes": {"bytes": "5"},
    "fractional bytes": {"bytes": 5.5},
    "many bytes": {"bytes": 2**200},
    "negative bytes": {"bytes": -1},
    "rest of a number": {"rest": 5},
    "rest of null": {"rest": None},
    **{
        f"range {lo} {hi}": {"arrays": {"params/dense.bias": [lo, hi, digest_of(b"")]}}
        for lo, hi in (
            (-8, 8),
            (0, 148),
            (5000, 4000),
            (5000, 5000),
            (0.5, 9.5),
            (_SIZE, 10**15),
            (2**70, 2**71),
            (True, 5),
        )
    },
    "overlap": {"arrays": {"a": [5000, 6000, digest_of(b"")], "b": [5500, 6500, digest_of(b"")]}},
    "gap": {"arrays": {"a": [[5000, 6000, digest_of(b"")], [6500, 7000, digest_of(b"")]]}},
}
TEXTS = {
    "deep manifest": b"[" * 3000,
    "deep manifest of objects": b'{"a":' * 600,
    "manifest of a number": b"5",
    "manifest of null": b"null",
    "manifest of nothing": b"",
    "manifest in latin": b'"\xff\xfe"',
    "manifest of digits": b"9" * 3900,
    "manifest without keys": b"{}",
}
RECIPES: dict[str, Recipe] = {
    **{name: lambda path, _, content=content: seal(path, content) for name, content in CONTENTS.items()},  # type: ignore[misc]
    **{name: lambda path, _, text=text: seal_text(path, text) for name, text in TEXTS.items()},  # type: ignore[misc]
}
