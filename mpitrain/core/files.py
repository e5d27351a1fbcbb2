"""Writing of files that others read, and errors of files that cannot be written."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from ..errors import RecordError, UserError


def replace_file(path: Path, content: bytes) -> None:
    """Write a file in one step: a reader sees the former content or all of the new one.

    The content is first written to a hidden file with the suffix ``.partial``.

    Raises:
        OSError: The file cannot be written.
    """
    partial = path.with_name(f".{path.name.lstrip('.')}.partial")
    partial.write_bytes(content)
    os.replace(partial, path)


@contextlib.contextmanager
def writing(path: Path, flag: str, kind: type[UserError] = RecordError) -> Iterator[None]:
    """Convert an ``OSError`` to the error for a file that cannot be written; ``flag`` is the option that names it."""
    try:
        yield
    except OSError as error:
        raise kind(f"{path} cannot be written: {error.strerror}; pass another {flag}") from error
