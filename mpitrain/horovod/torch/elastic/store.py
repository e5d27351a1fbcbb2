"""The file of committed state in the run directory. It is pickled: whoever can write it can make ranks run code."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ....checkpoint.disk import make_folder, replacing


class CommitFile:
    """The state that the first rank has committed. Every method is local.

    Args:
        path: Path of the file.
        is_writer: Whether this rank is the first one; other ranks neither read nor write.
    """

    def __init__(self, path: Path, is_writer: bool) -> None:
        self._path, self._is_writer = path, is_writer

    def read(self) -> Any:
        """Return the last commit; None if there is none."""
        if not self._is_writer or not self._path.exists():
            return None
        return torch.load(self._path, map_location="cpu", weights_only=False)

    def write(self, saved: Any) -> None:
        """Replace the file atomically.

        Raises:
            OSError: The file cannot be written.
        """
        if self._is_writer:
            content = io.BytesIO()
            torch.save(saved, content)
            make_folder(self._path.parent)
            with replacing(self._path) as writer:
                writer.append(np.frombuffer(content.getbuffer(), np.uint8))
