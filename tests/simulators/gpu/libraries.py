"""Simulates shared libraries that mpitrain loads: ``ctypes.CDLL(name)`` returns ``libraries[name]`` if it exists."""

from __future__ import annotations

import ctypes
from typing import Any

libraries: dict[str, Any] = {}


class _CDLL(ctypes.CDLL):
    def __new__(cls, name: Any = None, *arguments: Any, **options: Any) -> Any:
        return libraries[name] if name in libraries else super().__new__(cls)


ctypes.CDLL = _CDLL  # type: ignore[misc]
