"""Execution of the code on a documentation page, in the order of the page.

A code block with a caption is the file of that name. A block of type ``console`` has commands, which begin with ``$``.
Below each command are lines that it must print in this order; it may also print other lines. Numbers may differ.
``[...]`` stands for any text, ``/home/me/tutorial`` for the folder in which the commands run.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from sybil import Document, Region
from sybil.example import Example
from sybil.parsers.markdown.lexers import FencedCodeBlockLexer
from sybil.parsers.myst.lexers import DirectiveLexer
from sybil.typing import Parser

from .launch import ROOT, run

TIMEOUT_S = 120
_READERS_FOLDER = "/home/me/tutorial"


class Page:
    """A page of ``docs``, executed in a folder.

    Args:
        folder: The folder in which the page's files are written and its commands run.
        environment: Variables for the commands.
        prepare: Called with each command before it runs; returns the command to run instead.
    """

    def __init__(
        self,
        path: Path,
        folder: Path,
        environment: dict[str, str] | None = None,
        prepare: Callable[[str], str] = lambda command: command,
    ) -> None:
        self._path, self._folder, self._prepare = path, folder, prepare
        binaries = Path(sys.executable).parent
        self._environment = {
            "PATH": f"{binaries}:/usr/sbin:/usr/bin:/sbin:/bin",
            "COLUMNS": "200",
            **(environment or {}),
        }
        self.matched: list[tuple[str, str]] = []  # lines of the page, with the printed lines

    def execute(self) -> int:
        """Write the page's files and run its commands; return the number of commands."""
        self._commands = 0
        self._evaluate(self._files, self._consoles)
        return self._commands

    def write_files(self) -> None:
        """Write the page's files only."""
        self._evaluate(self._files)

    def _evaluate(self, *parsers: Parser) -> None:
        for example in Document.parse(str(self._path), *parsers).examples():
            example.evaluate()

    def _files(self, document: Document) -> Iterable[Region]:
        for region in DirectiveLexer("code-block")(document):
            if "caption" in region.lexemes["options"]:
                region.parsed = region.lexemes["options"]["caption"], region.lexemes["source"]
                region.evaluator = self._write
                yield region

    def _consoles(self, document: Document) -> Iterable[Region]:
        for region in FencedCodeBlockLexer("console")(document):
            region.parsed, region.evaluator = region.lexemes["source"], self._run
            yield region

    def _write(self, example: Example) -> None:
        name, source = example.parsed
        (self._folder / name).write_text(source)

    def _run(self, example: Example) -> None:
        for block in re.split(r"^\$ ", example.parsed, flags=re.MULTILINE)[1:]:
            command, *lines = block.rstrip("\n").split("\n")
            words = ["bash", "-c", f"exec 2>&1; {self._prepare(command)}"]
            done = run(words, timeout=TIMEOUT_S, env=self._environment, cwd=self._folder)
            self._compare(lines, done.stdout, f"{self._path.name}: {command}")
            self._commands += 1

    def _compare(self, expected: list[str], output: str, where: str) -> None:
        printed = iter(output.splitlines())
        for line in (line.replace(_READERS_FOLDER, str(self._folder)) for line in expected):
            pattern = re.compile(r"\S.*".join(map(re.escape, _without_numbers(line).split("[...]"))))
            found = next((other for other in printed if pattern.fullmatch(_without_numbers(other))), None)
            assert found is not None, f"{where} does not print {line!r}, but\n{output}"
            self.matched.append((line, found))


def _without_numbers(line: str) -> str:
    """Return a line with ``#`` in place of each number, and with single spaces."""
    return " ".join(re.sub(r"\d[\d.,:]*", "#", line).split())


def tutorial(name: str) -> Path:
    """Return the path of a chapter of the tutorial."""
    return ROOT / "docs" / "tutorial" / f"{name}.md"
