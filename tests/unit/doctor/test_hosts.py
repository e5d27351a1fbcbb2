"""Differences between hosts, and GPUs that are not well."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mpitrain.doctor import hosts
from mpitrain.doctor.finding import Finding

WELL = "NVIDIA H100, 580.1, 0, 16, 16, Not Active"
SMI = "#!/bin/sh\nprintf '%s\\n' {rows}\n"


def findings(monkeypatch: pytest.MonkeyPatch, others: list[tuple[str, dict[str, str], list[str]]]) -> list[Finding]:
    """Return the findings of this host and others, of which name, facts and problems are given."""
    comm = SimpleNamespace(allgather=lambda own: [own, *others, None])
    cluster: Any = SimpleNamespace(host="here", node=SimpleNamespace(rank=0), comm=comm)
    monkeypatch.setattr(hosts, "_facts", lambda cards: {"kernel": "6.1", "interfaces": "eth0 10,000 Mbit/s"})
    return [*hosts.check(cluster)]


def test_only_what_differs_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    same = {"kernel": "6.1", "interfaces": "eth0 10,000 Mbit/s"}
    (finding,) = findings(monkeypatch, [("a", same, [])])
    assert (finding.check, finding.verdict) == ("differences", "pass")
    (finding,) = findings(monkeypatch, [("a", same, []), ("b", {**same, "interfaces": "eth0 100 Mbit/s"}, [])])
    assert (finding.check, finding.verdict) == ("interfaces", "warning")
    assert finding.details == "eth0 100 Mbit/s on b; eth0 10,000 Mbit/s on the other 2 hosts"
    (finding,) = findings(monkeypatch, [("a", {**same, "torch": "2.9"}, []), ("b", {**same, "torch": "2.9"}, [])])
    assert finding.details == "none on here; 2.9 on the other 2 hosts"


@pytest.mark.parametrize(
    ("row", "named"),
    [
        (WELL, []),
        (WELL.replace(" 0,", " 3,"), ["3 uncorrected"]),
        (WELL.replace(" 16, 16", " 8, 16"), ["8 of 16"]),
        (WELL.replace("Not Active", "Active"), ["slowed down"]),
        (WELL.replace(" 0, 16, 16,", " [N/A], [N/A], [N/A],"), []),
    ],
)
def test_gpus_that_are_not_well(row: str, named: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nvidia-smi").write_text(SMI.format(rows=f"'{WELL}' '{row}'"))
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    found = findings(monkeypatch, [])
    assert len(found) == len(named)
    assert all(name in each.details and "GPU 1" in each.details for name, each in zip(named, found, strict=True))


def test_facts_of_this_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    facts = hosts._facts(hosts._cards())
    assert {"kernel", "cores", "interfaces", "processor", "shared memory", "numpy"} <= facts.keys()
    assert "GPUs" not in facts and all(facts.values())
