"""The output of programs that provoke exceptions: one line with a JSON object per exception."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping


def errors(stdout: str) -> list[dict[str, object]]:
    """Return the exceptions that the ranks have printed."""
    return [json.loads(line) for line in stdout.splitlines() if line.startswith("{")]


def assert_named(line: Mapping[str, object], kind: str, named: str) -> None:
    """Check the type of an exception and its message: one line that matches ``named``."""
    assert re.fullmatch(kind, str(line["error"])) and "\n" not in str(line["text"]), line
    assert re.search(named, str(line["text"])), line


def assert_named_on_both_ranks(stdout: str, expected: Mapping[str, tuple[str, str]]) -> None:
    """Check that, for each named mistake, both ranks have printed an exception of the expected type and message."""
    printed = errors(stdout)
    for name, (kind, named) in expected.items():
        lines = [line for line in printed if line["mistake"] == name]
        assert {line["rank"] for line in lines} == {0, 1}, name
        for line in lines:
            assert_named(line, kind, named)
