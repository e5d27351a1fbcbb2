"""The distinction between scripts that train and job files."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpitrain.errors import JobError
from mpitrain.plan.job import load_job_file
from mpitrain.plan.script import is_script, only_defines

_JOB = "def job(): pass\n"
_GUARDED = "if __name__ == '__main__':\n    mpitrain.train(job)\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import mpitrain\nmpitrain.train(1)", True),
        ("import mpitrain as mt\ndef main():\n    mt.Trainer(1, 2)", True),
        ("from mpitrain import Trainer as T\nT()", True),
        ("import mpitrain.data\nimport mpitrain\nmodel.train()", False),
        ("from mpitrain import Job", False),
        ("import mpitrain\n" + _JOB + "mpitrain.train(job)", True),
        ("import mpitrain\n" + _JOB + _GUARDED, False),
        ("import mpitrain\n" + _JOB + "def main():\n    mpitrain.train(job)", False),
        ("import mpitrain\nfrom common import job\n" + _GUARDED, False),
        ("def", False),
    ],
)
def test_is_script(text: str, expected: bool, tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text(text)
    assert is_script(path) is expected


@pytest.mark.parametrize("text", ["from tools import training", "import tools.training", "import tools.all"])
def test_a_script_may_train_in_its_own_modules(text: str, tmp_path: Path) -> None:
    path, tools = tmp_path / "a.py", tmp_path / "tools"
    path.write_text(text)
    assert not is_script(path)
    tools.mkdir()
    (tools / "all.py").write_text("import torch, tools.training")
    (tools / "training.py").write_text("import a, mpitrain\nclass T: trainer = mpitrain.Trainer")
    assert is_script(path)
    (tools / "training.py").write_text("import a, mpitrain")
    assert not is_script(path)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('"""A module."""\nimport os\nSIZES = (1, -2)\nclass A: pass\ndef main() -> None: ...', True),
        ("def main(): pass\nmain()", False),
        ("def main(): pass\nresult = main()", False),
        ("def main(): pass\nif __name__ == '__main__':\n    main()", False),
        ("import program", False),
        ("", False),
        ("def", False),
    ],
)
def test_only_defines(text: str, expected: bool, tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text(text)
    assert only_defines(path) is expected


def test_a_file_that_cannot_define_a_job_is_not_run(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    for text in ("open({!r}, 'w')", "for {!r} in x: pass", "jobs = 1\ndef train(job): open({!r}, 'w')"):
        path.write_text(text.format(str(tmp_path / "made")))
        with pytest.raises(JobError):
            load_job_file(path)
        assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    "text", ["if 1:\n    job = f", "globals()['job'] = f", "try:\n    from x import *\nfinally: 1"]
)
def test_a_file_that_may_define_a_job_is_run(text: str, tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text("def f(): pass\nimport sys\nsys.modules['x'] = sys\nsys.job = f\n" + text)
    assert load_job_file(path)() is None
