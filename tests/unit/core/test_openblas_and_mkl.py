"""Matrix products of torch in a process that imports the package: the same bits at any address."""

from __future__ import annotations

import subprocess
import sys

import pytest

from mpitrain.core.openblas import MKL_RESULTS, choose_results_of_mkl

from ...support.waiting import limit

CODE = """
import mpitrain.core.openblas, torch
torch.set_num_threads(1)
for dtype in (torch.float32, torch.float64):
    for rows, inputs, outputs in ((7, 6, 8), (16, 784, 10), (100, 6, 8), (33, 65, 17)):
        x, w, g = (torch.randn(*size, dtype=dtype) for size in ((rows, inputs), (outputs, inputs), (rows, outputs)))
        results = set()
        for offset in range(64 // x.element_size()):
            buffer = torch.empty(x.numel() + 64, dtype=dtype)
            start = -buffer.data_ptr() % 64 // x.element_size() + offset
            at = buffer[start : start + x.numel()].view_as(x)
            at.copy_(x)
            results.add((torch.nn.functional.linear(at, w).numpy().tobytes(), (g.T @ at).numpy().tobytes()))
        assert len(results) == 1, (dtype, rows, inputs, outputs)
"""


def test_products_do_not_depend_on_the_alignment() -> None:
    pytest.importorskip("torch")
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=limit(60))
    assert done.returncode == 0, done.stderr


def test_a_choice_of_the_user_has_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpitrain.core.openblas.CHOSEN", {})
    environ = {MKL_RESULTS: "COMPATIBLE"}
    choose_results_of_mkl(environ, "")
    assert environ == {MKL_RESULTS: "COMPATIBLE"}
