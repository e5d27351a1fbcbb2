"""Job functions as files."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from mpitrain.api.job_source import job_file_text
from mpitrain.plan.job import load_job_file


def test_a_function_of_a_file_with_a_hostile_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", sys.path[:])
    code = compile("width = 3\ndef f(x): return x + width", 'a\n"""; raise SystemExit #\'.py', "exec")
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(code, namespace)
    name, text = job_file_text(namespace["f"])
    path = tmp_path / f"{name}.py"
    path.write_text(text)
    assert load_job_file(path)(4) == 7
