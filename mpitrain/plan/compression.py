"""The value of ``--compress``: how gradients are sent between nodes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

from ..errors import ConfigError
from .modes import MODES, Mode, names_of_modes


class CodecInfo(NamedTuple):
    """A value of ``--compress``.

    Attributes:
        modes: Returns whether a mode supports it.
        number: The name of the number that follows the value's name, if any.
        measured: The value that ``mpitrain probe`` measures; empty if it is not measured.
    """

    modes: Callable[[Mode], bool] = lambda mode: True
    number: str = ""
    measured: str = ""


# By name. float32 compresses vectors in float64.
CODECS = {
    "bfloat16": CodecInfo(measured="bfloat16"),
    "float16": CodecInfo(),
    "float32": CodecInfo(),
    "int8": CodecInfo(measured="int8"),
    "int4": CodecInfo(lambda mode: mode.averages_params, measured="int4"),
    "powersgd": CodecInfo(lambda mode: mode.averages_gradients, "RANK", "powersgd:4"),
    "topk": CodecInfo(lambda mode: mode.uses_servers, "FRACTION", "topk:0.01"),
}
_CLASS = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


class Compression(NamedTuple):
    """How gradients are compressed between nodes.

    Attributes:
        name: One of ``CODECS``; or ``package.module:Class``, a codec of the user's own.
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
    if text in CODECS and not CODECS[text].number:
        return Compression(text)
    if name == "powersgd" and number.isdecimal() and int(number) > 0:
        return Compression(name, rank=int(number))
    if name == "topk" and re.fullmatch(r"0?\.\d+|1(\.0*)?|\d+e-\d+", number) and 0 < float(number) <= 1:
        return Compression(name, fraction=float(number))
    if name not in CODECS and _CLASS.fullmatch(text):
        return Compression(text)
    raise ConfigError(
        f"--compress is {text!r}: must be {values_of(CODECS)}; RANK is a positive integer, 0 < FRACTION <= 1"
    )


def codecs_of(mode: Mode) -> tuple[str, ...]:
    """Return the names of the codecs that a mode supports."""
    return tuple(name for name, codec in CODECS.items() if codec.modes(mode))


def values_of(names: Iterable[str]) -> str:
    """Return the values of ``--compress`` with these names, for messages."""
    return f"{', '.join(map(_with_number, names))}, or package.module:Class"


def values_by_mode() -> str:
    """Return the values of ``--compress`` in all modes, and then those of some modes, for help."""
    common = [name for name, codec in CODECS.items() if all(map(codec.modes, MODES.values()))]
    others = [name for name in CODECS if name not in common]
    limited = (f" Only in {', '.join(names_of_modes(CODECS[name].modes))}: {_with_number(name)}." for name in others)
    return f"{', '.join(common)}.{''.join(limited)}"


def _with_number(name: str) -> str:
    return f"{name}:{CODECS[name].number}" if CODECS[name].number else name
