"""cuDNN's convolutions on a GPU, if its frontend is installed, compared with the CPU's."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from ..support.launch import PROGRAMS, run, with_checkout

if importlib.util.find_spec("cupy") is None or importlib.util.find_spec("cudnn") is None:
    pytest.skip("CuPy and cuDNN's frontend are not both installed", allow_module_level=True)

import cupy

if not cupy.is_available():
    pytest.skip("no NVIDIA GPU", allow_module_level=True)

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("precision", ["float32", "tf32", "bfloat16", "float16"])
def test_cudnn_agrees_with_the_cpu(precision: str) -> None:
    """Operations without a plan use matrix products; at least one convolution must use cuDNN for all operations."""
    words = [sys.executable, str(PROGRAMS / "convolutions.py"), precision]
    done = run(words, timeout=300, env=with_checkout())
    assert done.returncode == 0, done.stderr
    computed = [line.split()[1] for line in done.stdout.splitlines() if line.startswith(precision)]
    assert len(computed) == 36 and "cuDNN" in computed
