"""Images as files, and the examples that splits return."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mpitrain import data
from mpitrain.errors import DataError


def pixels(seed: int, height: int = 6, width: int = 4) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def png(image: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG")
    return file.getvalue()


def examples_of(split: data.Split) -> list[Any]:
    """Load the examples of a split that is loaded one by one, each in a separate batch."""
    loader = split.own_loader(0)
    assert loader is not None
    return [loader.sequential(index, index + 1).examples for index in range(len(split))]


def refused(pattern: str | Path, function: Any, *arguments: Any, **options: Any) -> None:
    with pytest.raises(DataError, match=re.escape(str(pattern))) as caught:
        function(*arguments, **options)
    assert "\n" not in str(caught.value)
