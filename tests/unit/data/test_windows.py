"""Windows of a series."""

from __future__ import annotations

import numpy as np

from mpitrain import data

from ...support.examples import examples_of, refused


def test_windows() -> None:
    tokens = np.arange(20)
    split = data.windows(tokens, 6, 4)
    read = examples_of(split)
    assert [window[0].tolist() for window, _ in read] == [list(range(i, i + 6)) for i in (0, 4, 8, 12)]
    assert all((later == window + 1).all() for window, later in read)
    assert len(examples_of(data.windows(tokens, 6, 1, ahead=0))) == 15
    refused("at least 7", data.windows, np.arange(6), 6)
    refused("stride=0", data.windows, tokens, 6, 0)
