"""Keyword arguments of the Python API as flags, and job functions as files."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from mpitrain.api.arguments import split_words
from mpitrain.api.job_source import job_file_text
from mpitrain.cli.run import RunCommand
from mpitrain.cli.submit import SubmitCommand
from mpitrain.plan.job import load_job_file


@pytest.mark.parametrize(
    ("given", "own", "of_job"),
    [
        ({"ranks": 4, "mode": "async", "resume": None}, ["--ranks=4", "--mode=async"], []),
        ({"save_background": True, "trace": False}, ["--save-background", "--no-trace"], []),
        ({"env": {"A": "b c", "D": 1}}, ["--env=A=b c", "--env=D=1"], []),
        ({"env": ["A=1", "B"]}, ["--env=A=1", "--env=B"], []),
        ({"env": "A=1"}, ["--env=A=1"], []),
        ({"width": 3, "sizes": [1, 2], "rate": -1e-3, "deep": False}, [], "width=3 sizes=1,2 rate=-0.001 no-deep"),
        ({"folder": Path("a b"), "name": "--x"}, [], ["--folder=a b", "--name=--x"]),
    ],
    ids=str,
)
def test_arguments_become_flags(given: dict[str, object], own: list[str], of_job: str | list[str]) -> None:
    expected = [f"--{word}" for word in of_job.split()] if isinstance(of_job, str) else of_job
    assert split_words(RunCommand().options, given) == (own, expected)


def test_flags_without_a_negative_form() -> None:
    assert split_words(SubmitCommand().options, {"dry_run": True, "follow": False}) == (["--dry-run"], [])


def test_a_function_of_a_file_with_a_hostile_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", sys.path[:])
    code = compile("width = 3\ndef f(x): return x + width", 'a\n"""; raise SystemExit #\'.py', "exec")
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(code, namespace)
    name, text = job_file_text(namespace["f"])
    path = tmp_path / f"{name}.py"
    path.write_text(text)
    assert load_job_file(path)(4) == 7
