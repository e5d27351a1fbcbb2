"""Names of version 0.1 that job files may still use; each use emits a ``FutureWarning``, shown by default."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from operator import attrgetter
from typing import Any


class Renamed:
    """An attribute or method under its former name.

    Args:
        new: The current name.
    """

    def __init__(self, new: str) -> None:
        self._new = new

    def __set_name__(self, owner: type, name: str) -> None:
        self._old = f"{owner.__name__}.{name}"

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        warn(self._old, self._new)
        return attrgetter(self._new)(owner if instance is None else instance)

    def __set__(self, instance: Any, value: Any) -> None:
        warn(self._old, self._new)
        setattr(instance, self._new, value)


def logged(old: str) -> Callable[[Any, str], None]:
    """Return a method that logs its argument: the former way to print a line."""

    def log(self: Any, line: str) -> None:
        warn(old, 'logging.getLogger("mpitrain").info')
        logging.getLogger("mpitrain").info("%s", line)

    return log


def class_option(cls: type, new: str, old: str) -> bool:
    """Return a boolean that the class itself sets under its current or former name; False if it sets neither."""
    own = vars(cls)
    if old in own and not isinstance(own[old], Renamed):
        warn(f"{cls.__name__}.{old}", new, stacklevel=4)
        return bool(own[old])
    return bool(own.get(new, False))


def warn(old: str, new: str, stacklevel: int = 3) -> None:
    """Warn about a former name, at the line that uses it."""
    text = f"{old} of version 0.1 is now called {new}; the former name will be removed"
    warnings.warn(text, FutureWarning, stacklevel=stacklevel)
