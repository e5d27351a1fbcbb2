"""``--help`` and ``--help-all`` of every command, and the messages for mistyped commands."""

from __future__ import annotations

import shlex

import click
import pytest

from mpitrain.cli.main import _COMMANDS, _Commands, main
from mpitrain.plan.config import FIELDS
from mpitrain.plan.option import flag

from ...support.launch import ROOT

WITH_JOBS = ("run", "train", "submit", "data", "placement")


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(words) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", _COMMANDS)
def test_help_fits_on_a_page_and_ends_with_an_example_that_can_be_parsed(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = printed(capsys, name, "--help").splitlines()
    assert len(lines) <= 70
    assert max(map(len, lines)) <= 80
    assert not any(line.endswith("-") for line in lines), "a flag is broken at its hyphen"
    heading = next(index for index, line in enumerate(lines) if line.strip() in ("Example:", "Examples:"))
    assert lines[heading + 1 :]
    monkeypatch.chdir(ROOT)
    for line in lines[heading + 1 :]:
        words = shlex.split(line)
        words = words[words.index("mpitrain") + 1 :]
        assert words[0] == name
        command = _Commands("mpitrain").get_command(click.Context(click.Command("mpitrain")), name)
        assert command is not None
        command.make_context(name, words[1:])


@pytest.mark.parametrize("name", WITH_JOBS)
def test_help_all_describes_every_option_and_help_the_common_ones(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def described(*words: str) -> set[str]:
        lines = printed(capsys, name, *words).splitlines()
        return {word.rstrip(",") for line in lines for word in line.split() if word.startswith("--")}

    common, every = described("--help"), described("--help-all")
    assert {"--mode", "--batch-size", "--run-dir", "--help-all"} <= common < every
    assert {flag(option) for option in FIELDS} <= every
    assert "--hidden-units" in described(str(ROOT / "jobs" / "mnist_mlp.py"), "--help-all")


def test_probe_hides_the_options_that_it_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    words = printed(capsys, "probe", "--help-all").split()
    assert "--batch-size" in words
    assert not {"--mode", "--ps", "--compress"} & set(words)


@pytest.mark.parametrize(
    ("word", "suggestion"),
    [("wacth", "'watch'"), ("evalute", "'evaluate'"), ("job.py", "run job.py"), ("zzz", "--help")],
)
def test_a_mistyped_command(word: str, suggestion: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([word]) == 2
    error = capsys.readouterr().err
    assert suggestion in error
    assert error.count("\n") == 1
