"""The value of ``--compress``: how gradients are sent between nodes."""

from __future__ import annotations

import re
from typing import NamedTuple

from ..errors import ConfigError

_VALID = "bfloat16, float16, int8, int4, powersgd:RANK, topk:FRACTION, or package.module:Class"
_CLASS = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


class Compression(NamedTuple):
    """How gradients are compressed between nodes.

    Attributes:
        name: ``bfloat16``, ``float16``, ``float32``, ``int8``, ``int4``, ``powersgd`` or ``topk``; or
            ``package.module:Class``, a codec of the user's own.
        rank: Of ``powersgd``, else 0.
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
        """Whether it is a codec of the user's own."""
        return ":" in self.name


def parse_compression(text: str) -> Compression:
    """Return the value of ``--compress``.

    Raises:
        ConfigError: There is no such compression.
    """
    name, _, number = text.partition(":")
    if text in ("bfloat16", "float16", "float32", "int8", "int4"):
        return Compression(text)
    if name == "powersgd" and number.isdecimal() and int(number) > 0:
        return Compression(name, rank=int(number))
    if name == "topk" and re.fullmatch(r"0?\.\d+|1(\.0*)?|\d+e-\d+", number) and 0 < float(number) <= 1:
        return Compression(name, fraction=float(number))
    if name not in ("powersgd", "topk") and _CLASS.fullmatch(text):
        return Compression(text)
    raise ConfigError(f"--compress is {text!r}: must be {_VALID}; RANK is a positive integer, 0 < FRACTION <= 1")
