"""Parts of messages to the user."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_LISTED = 8


def input_hint(error: str) -> str:
    """Return what to do about an error, as of ``Type: text``, if it follows from an empty standard input."""
    if error != "EOFError: EOF when reading a line" and error.partition(":")[0].rpartition(".")[2] != "BdbQuit":
        return ""
    return "; standard input is empty or has ended; mpitrain run --debug RANK gives it to another rank"


def one_line(error: object) -> str:
    """Return an error's text in one line."""
    return " ".join(str(error).split())


def nearest(word: str, known: Iterable[str]) -> str:
    """Return the known word that is most similar to ``word``, whatever its case; empty if none is similar."""
    by_lower = {name.lower(): name for name in known}
    return by_lower[similar[0]] if (similar := difflib.get_close_matches(word.lower(), by_lower, n=1)) else ""


def suggestion(word: str, known: Iterable[str], otherwise: str = "") -> str:
    """Return the end of a message about an unknown word: ``; did you mean 'rank'?``, or ``otherwise``."""
    return f"; did you mean {near!r}?" if (near := nearest(word, known)) else otherwise


def counted(number: int, noun: str) -> str:
    """Return ``1 rank`` or ``2 ranks``."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def numbered(noun: str, numbers: Iterable[object]) -> str:
    """Return ``rank 1``, ``ranks 1, 2``, or the first eight and the number of the others."""
    listed = [*numbers]
    more = f" and {len(listed) - _LISTED:,} more" * (len(listed) > _LISTED)
    return f"{noun}{'s' * (len(listed) > 1)} {', '.join(map(str, listed[:_LISTED]))}{more}"
