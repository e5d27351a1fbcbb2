"""A sample text for language models."""

from __future__ import annotations

import gzip
from importlib.resources import files


def sample_text() -> str:
    """Return the first 30 chapters of Moby-Dick, 263,585 ASCII characters; each paragraph is one line."""
    return gzip.decompress((files(__package__) / "moby_dick" / "moby_dick.txt.gz").read_bytes()).decode("ascii")
