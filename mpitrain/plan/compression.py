"""The value of ``--compress``: how gradients are sent between nodes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from ..errors import ConfigError

_WORDS = ("bfloat16", "float16", "float32", "int8", "int4")
_NUMBERS = {"powersgd": "powersgd:RANK", "topk": "topk:FRACTION"}
_CLASS = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


class Compression(NamedTuple):
    """How gradients are compressed between nodes.

    Attributes:
        name: ``bfloat16``, ``float16``, ``float32``, ``int8``, ``int4``, ``powersgd`` or ``topk``; or
            ``package.module:Class``, a codec of the user's own.
        rank: The rank of ``powersgd``, else 0.
        fraction: The part of the elements that ``topk`` sends, else 0.
    """

    name: str
    rank: int = 0
    fraction: float = 0.0

    def __str__(self) -> str:
        number = {"powersgd": f":{self.rank}", "topk": f":{self.fraction:g}"}
        return self.name + number.get(self.name, "")

    @property
    def is_class(self) -> bool:
        """Whether the compression is a codec of the user's own."""
        return ":" in self.name


def parse_compression(text: str) -> Compression:
    """Return the value of ``--compress``.

    Raises:
        ConfigError: The text is not the name of a compression.
    """
    name, _, number = text.partition(":")
    if text in _WORDS:
        return Compression(text)
    if name == "powersgd" and number.isdecimal() and int(number) > 0:
        return Compression(name, rank=int(number))
    if name == "topk" and re.fullmatch(r"0?\.\d+|1(\.0*)?|\d+e-\d+", number) and 0 < float(number) <= 1:
        return Compression(name, fraction=float(number))
    if name not in ("powersgd", "topk") and _CLASS.fullmatch(text):
        return Compression(text)
    valid = values_of((*_WORDS, *_NUMBERS))
    raise ConfigError(f"--compress is {text!r}: must be {valid}; RANK is a positive integer, 0 < FRACTION <= 1")


def values_of(names: Sequence[str]) -> str:
    """Return the values of ``--compress`` with these names, for messages."""
    return f"{', '.join(_NUMBERS.get(name, name) for name in names)}, or package.module:Class"
