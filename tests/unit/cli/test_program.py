"""Command lines that name a program or a script."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mpitrain.cli.main import invoke
from mpitrain.cli.run import RunCommand
from mpitrain.plan.program import ProgramRequest
from mpitrain.plan.request import JobRequest


def workload_of(*words: str) -> Any:
    return invoke(RunCommand(lambda request: request.workload), words)


TRAINS = "import mpitrain\n\ntrainer = mpitrain.Trainer()\n"


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        ([], []),
        (["--depth", "4"], ["--depth", "4"]),
        (["--", "--depth", "4"], ["--depth", "4"]),
        (["a", "--", "b"], ["a", "--", "b"]),
        (["--", "a", "--", "b"], ["a", "--", "b"]),
        (["--", "--", "a"], ["--", "a"]),
        (["--"], []),
    ],
)
@pytest.mark.parametrize("kind", ["script", "module", "trains"])
def test_two_dashes_after_a_program_as_with_torchrun(
    words: list[str], arguments: list[str], kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("prog.py").write_text(TRAINS if kind == "trains" else "print(1)\n")
    target = ["-m", "prog"] if kind == "module" else ["prog.py"]
    workload = workload_of("-n", "2", *target, *words)
    if kind == "trains":
        assert isinstance(workload, JobRequest) and workload.script_arguments == tuple(arguments)
        again = workload_of("-n", "2", *workload.words)
        assert again.script_arguments == tuple(arguments)
    else:
        assert isinstance(workload, ProgramRequest) and list(workload.argv[len(target) + 1 :]) == arguments


def test_a_command_keeps_its_two_dashes() -> None:
    workload = workload_of("--", "sleep", "log", "--", "path")
    assert workload.argv == ("sleep", "log", "--", "path")
