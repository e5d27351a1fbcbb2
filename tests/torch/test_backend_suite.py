"""A sample of PyTorch's own tests of torch.distributed over the backend; ``bench/torch_suite.py`` runs all."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from ..support.launch import ROOT, missing, run


def test_tests_of_pytorch_pass(tmp_path: Path) -> None:
    try:
        import expecttest  # noqa: F401
    except ImportError:
        missing("expecttest, which PyTorch's tests import")
    output = tmp_path / "outcomes.json"
    words = [sys.executable, ROOT / "bench" / "torch_suite.py", "--ranks", "2", "--backends", "mpitrain"]
    done = run([*map(str, words), "--tests", "test_*gather*", "--output", str(output)], timeout=300)
    assert done.returncode == 0, done.stderr
    (entry,) = json.loads(output.read_text())
    assert entry["mpitrain fails"] == {}
    assert entry["mpitrain"]["passed"] >= 14
