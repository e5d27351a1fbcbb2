"""Flags that ``mpitrain submit`` refuses."""

from __future__ import annotations

from pathlib import Path

import click
import pytest

from mpitrain.cli.submit import SubmitCommand

JOB = str(Path(__file__).parents[3] / "jobs" / "mnist_mlp.py")
SCRIPT = str(Path(__file__).parents[3] / "jobs" / "ddp_script.py")


@pytest.mark.parametrize(
    "words",
    [
        ["--max-restarts", "3", JOB],
        [JOB, "--min-ranks=3"],
        ["--hosts", "a", SCRIPT],
        ["--max-restarts", "3", "--", "sleep", "1"],
    ],
)
def test_flags_of_run_alone_are_refused(words: list[str]) -> None:
    with pytest.raises(click.NoSuchOption, match="mpitrain run"):
        SubmitCommand(lambda request: request).main(words, standalone_mode=False)


@pytest.mark.parametrize("program", [[SCRIPT], ["--", "sleep"], ["-m", "json.tool"]])
def test_words_after_a_program_are_its_own(program: list[str]) -> None:
    request = SubmitCommand(lambda request: request).main([*program, "--max-restarts", "3"], standalone_mode=False)
    assert request.workload.words[-2:] == ["--max-restarts", "3"]
