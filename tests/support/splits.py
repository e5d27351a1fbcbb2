"""Reads splits, and their errors."""

from __future__ import annotations

import numpy as np
import pytest

from mpitrain.errors import DataError


def read(split, start=0, stop=None):
    stop = len(split) if stop is None else stop
    examples = np.empty((stop - start, *split.shape), split.dtype)
    labels = np.empty((stop - start, *split.label_shape), split.label_dtype)
    split.read(start, stop, examples, labels)
    return examples, labels


def message(act):
    with pytest.raises(DataError) as caught:
        act()
    text = str(caught.value)
    assert "\n" not in text
    return text
