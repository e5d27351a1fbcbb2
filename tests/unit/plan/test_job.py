"""Errors of the code of job files."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpitrain.errors import JobError
from mpitrain.plan.job import load_job_file


def test_an_error_in_a_module_of_the_user_names_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.py").write_text("from mpitrain import Job\n\nimport module_with_an_error\n\n\ndef job() -> Job: ...\n")
    Path("module_with_an_error.py").write_text("import json\n\n\njson.loads('?')\n")
    with pytest.raises(JobError, match=r"^job\.py, line 3, in module_with_an_error\.py, line 4: JSONDecodeError"):
        load_job_file(Path("job.py"))
