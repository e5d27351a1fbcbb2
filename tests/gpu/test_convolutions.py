"""cuDNN's convolutions on a GPU, where its frontend is installed, against the processor's."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

if importlib.util.find_spec("cupy") is None or importlib.util.find_spec("cudnn") is None:
    pytest.skip("CuPy and cuDNN's frontend are not both installed", allow_module_level=True)

import cupy

if not cupy.is_available():
    pytest.skip("no NVIDIA GPU", allow_module_level=True)

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "tests" / "support" / "programs" / "convolutions.py"

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("precision", ["float32", "tf32", "bfloat16", "float16"])
def test_cudnn_agrees_with_the_processor(precision: str) -> None:
    """Also where it has no plan: but it has some."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    words = [sys.executable, str(PROGRAM), precision]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    ways = [line.split()[1] for line in done.stdout.splitlines() if line.startswith(precision)]
    assert len(ways) == 36 and "cuDNN" in ways
