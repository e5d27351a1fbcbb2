"""What doctor reads from other programs, and how findings become an exit status."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from mpitrain.doctor import gpu, slurm
from mpitrain.doctor.files import file_system
from mpitrain.doctor.finding import Finding, as_json, exit_status, show

# As nvidia-smi answers on a machine with two devices, one of which does not tell its temperature.
SMI = """NVIDIA H100 80GB HBM3, 81559, 1, 31, 535.161.08
NVIDIA H100 80GB HBM3, 81559, 60000, [N/A], 535.161.08
"""
# As Slurm 22.05 and 23.11 answer.
PLUGINS = (
    "MPI plugin types are...\n\tcray_shasta\n\tnone\n\tpmi2\n\tpmix\nspecific pmix plugin versions available: pmix_v4\n"
)


def test_devices_are_read() -> None:
    first, second = gpu.parse(SMI)
    assert (first.name, first.memory, first.temperature) == ("NVIDIA H100 80GB HBM3", 81559 << 20, 31)
    assert (second.used, second.temperature) == (60000 << 20, 0)
    assert gpu.parse("No devices were found\n") == []


@pytest.mark.parametrize(
    ("count", "said", "left"),
    [(4, None, [0, 1, 2, 3]), (4, "2,3", [2, 3]), (4, "", []), (2, "-1", []), (2, "GPU-8f2a,GPU-11b0", [0, 1])],
)
def test_visible_devices(count: int, said: str | None, left: list[int]) -> None:
    assert gpu.visible(count, said) == left


def test_plugins_are_read() -> None:
    assert slurm.plugins(PLUGINS) == ["cray_shasta", "pmi2", "pmix"]


def test_file_systems_are_told() -> None:
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
        "mend": "mend it",
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
