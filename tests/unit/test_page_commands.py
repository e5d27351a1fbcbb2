"""The commands on the pages and in the README exist, and so do their flags."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from mpitrain.cli.main import commands as make_commands
from mpitrain.launcher.batch.request import submit_flags
from mpitrain.plan.options import run_options

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs" / "tutorial").glob("*.md"))]
_COMMAND = re.compile(r"^(?: {4}|\$ | {4}\$ )mpitrain ((?:.*\\\n)*.*)$", re.MULTILINE)
_MISTAKES = {"--hiden-units", "--hidden-unit"}  # mistyped flags whose error messages pages show
_PROGRAMS = ("train.py", "-m", "--")  # flags after one of these words are those of the program
_PARAMETERS = re.compile(r"^def \w+\(([^)]*)\)", re.MULTILINE)
_ARGUMENT = re.compile(r"""add_argument\(["'](--[\w-]+)""")


def commands_of(text: str) -> Iterator[list[str]]:
    for words in _COMMAND.findall(text):
        with_comments = words.replace("\\\n", " ")
        try:
            yield shlex.split(with_comments, comments=True)
        except ValueError:  # text that begins like a command
            continue


def own_flags(text: str) -> set[str]:
    """Return the flags of the jobs and scripts that are on the page or in ``jobs``."""
    sources = [text, *(path.read_text() for path in (ROOT / "jobs").glob("*.py"))]
    names = {
        name.split(":")[0].split("=")[0].strip().replace("_", "-")
        for source in sources
        for parameters in _PARAMETERS.findall(source)
        for name in parameters.split(",")
    }
    return {f"--{name}" for name in names} | {flag for source in sources for flag in _ARGUMENT.findall(source)}


@pytest.fixture(scope="module")
def commands() -> click.Group:
    return make_commands()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_flags_exist(page: Path, commands: click.Group) -> None:
    text = page.read_text()
    context = click.Context(commands)
    for name, *words in commands_of(text):
        if not re.fullmatch(r"[a-z-]+", name):
            continue
        command = commands.get_command(context, name)
        assert command is not None, f"{page.name}: mpitrain {name}"
        options = [*command.params, *run_options(), *(submit_flags() if name == "submit" else ())]
        known = {flag for option in options for flag in (*option.opts, *option.secondary_opts)}
        program = next((index for index, word in enumerate(words) if word in _PROGRAMS), len(words))
        flags = {word.partition("=")[0] for word in words[:program] if re.fullmatch(r"--[a-z][\w-]*(=.*)?", word)}
        unknown = flags - known - own_flags(text) - _MISTAKES - {"--help", "--help-all"}
        assert not unknown, f"{page.name}: mpitrain {name} {' '.join(words)}: {unknown}"
