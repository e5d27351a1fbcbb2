"""The process that reads the HDF5 structure has limits, and its answer is not trusted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mpitrain.checkpoint import isolation
from mpitrain.checkpoint.structure import UnsupportedStructure

from ...support.damage import save

Ask = Callable[[str], object]


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ask:
    """Run code in place of the child's, within its limits."""
    start = "import os, sys, time; sys.path[:] = {path!r}; from mpitrain.checkpoint import isolation; "
    limit = "isolation._SECONDS = 1; isolation._limit({size}); "

    def run(code: str) -> object:
        monkeypatch.setattr(isolation, "_CODE", start + limit + code.replace("{", "{{").replace("}", "}}"))
        with save(tmp_path, 30).open("rb") as file:
            return isolation.structure_in_child(file.fileno(), 50_000)

    return run


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("os.abort()", "signal 6"),
        ("exec('while True: pass')", "signal 9"),
        ("bytearray(1 << 30)", "status 1"),
        ("open('/dev/null')", "status 1"),
        ("os.dup(0)", "status 1"),
        ("import socket; socket.socket()", "status 1"),
        ("print('x' * (1 << 22), flush=True)", "status 1"),
        ("os.write(0, b'x')", "status 1"),
    ],
)
def test_a_process_that_crashes_or_exceeds_its_limits_is_reported(ask: Ask, code: str, message: str) -> None:
    with pytest.raises(UnsupportedStructure, match=message):
        ask(code)


def test_a_process_that_waits_is_ended(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolation, "_START_S", 1)
    monkeypatch.setattr(isolation, "_SECONDS", 0)
    with pytest.raises(UnsupportedStructure, match="within 1 s"):
        ask("time.sleep(60)")


@pytest.mark.parametrize(
    "answer",
    [
        *(None, 5, [], {}, "a\nb"),
        {"groups": {}, "datasets": {}},
        {"groups": {}, "datasets": {}, "places": {"x": [1]}},
        {"groups": {}, "datasets": {}, "places": {"x": [0.5, 1]}},
        {"groups": {}, "datasets": {"x": {"dtype": "O", "shape": []}}, "places": {}},
    ],
    ids=str,
)
def test_a_malformed_answer_is_refused(ask: Ask, answer: Any) -> None:
    with pytest.raises(UnsupportedStructure, match="its structure is malformed"):
        ask(f"print({json.dumps(answer)!r})")


def test_a_reason_is_passed_on(ask: Ask) -> None:
    with pytest.raises(UnsupportedStructure, match="its HDF5 structure is not valid: it has a soft link"):
        ask("print('\"it has a soft link\"')")
