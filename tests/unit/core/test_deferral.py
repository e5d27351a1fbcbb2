"""Processes that start others do not import the compiler, but kernels work in them, too."""

from __future__ import annotations

import os
import subprocess
import sys

from ...support.launch import with_checkout
from ...support.waiting import limit

_PROGRAM = """
import sys
from mpitrain.core import deferral
deferral.defer()
import numpy as np
import mpitrain.launcher.supervisor, mpitrain.plan.job
from mpitrain import Job, data, nn, optim
from mpitrain.core import kernels, ops
assert "numba" not in sys.modules

rows, total = np.arange(14, dtype=np.float32).reshape(7, 2), np.zeros(2, np.float32)
kernels.sum_rows(rows, np.array([0, 1, -1, 2, 3, -1, -1]), 0, 2, 0.5, total)
assert total.tolist() == [6.0, 8.0]
taken = np.zeros((2, 2), np.float32)
ops.take(rows, np.array([3, 1]), 2.0, taken)
assert taken.tolist() == [[12.0, 14.0], [4.0, 6.0]]
kernels.sum_rows(rows, np.array([6]), 0, 2, 1.0, total)
assert total.tolist() == [12.0, 13.0] and "numba" in sys.modules
"""


def test_kernels_that_call_others_are_made_when_they_are_called() -> None:
    words = [sys.executable, "-c", _PROGRAM]
    subprocess.run(words, env={**os.environ, **with_checkout()}, timeout=limit(120), check=True)
