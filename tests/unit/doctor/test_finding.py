"""Doctor's parsing of other programs' output, and the exit status for findings."""

from __future__ import annotations

import io
import json
from pathlib import Path

from rich.console import Console

from mpitrain.doctor import slurm
from mpitrain.doctor.files import file_system
from mpitrain.doctor.finding import Finding, as_json, exit_status, show

# Output of Slurm 22.05 and 23.11.
PLUGINS = (
    "MPI plugin types are...\n\tcray_shasta\n\tnone\n\tpmi2\n\tpmix\nspecific pmix plugin versions available: pmix_v4\n"
)


def test_plugins_are_read() -> None:
    assert slurm.plugins(PLUGINS) == ["cray_shasta", "pmi2", "pmix"]


def test_file_systems_are_reported() -> None:
    assert file_system(Path("/proc/self")) == "proc"
    assert file_system(Path("/dev/shm/x")) == "tmpfs"


def test_only_failures_are_a_status() -> None:
    passed, warned = Finding("A", "a", "pass", "x"), Finding("A", "b", "warning", "y", "mend it")
    assert exit_status([passed, warned]) == 0
    assert exit_status([passed, Finding("B", "c", "failure", "z")]) == 1
    assert json.loads(as_json([warned]))[0] == {
        "topic": "A",
        "check": "b",
        "verdict": "warning",
        "found": "y",
        "advice": "mend it",
    }


def test_every_finding_is_shown_with_its_mend_at_80_columns() -> None:
    out = io.StringIO()
    findings = [Finding("A", "a", "pass", "[x] " + "long " * 40), Finding("B", "b", "warning", "y", "mend [it]")]
    show(findings, Console(file=out, width=80))
    text = out.getvalue()
    assert all(len(line) <= 80 for line in text.splitlines())
    assert "[x] long" in text
    assert "-> mend [it]" in text
    assert "0 failures, 1 warning, 1 passed" in text
