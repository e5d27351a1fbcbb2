"""Shares of the cores of a host."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mpitrain.core import cpus
from mpitrain.core.cpus import Binding, crowded


@pytest.mark.parametrize(
    ("cores", "processes", "own", "expected"),
    [
        (8, 2, range(8), 4),
        (8, 3, range(8), 2),
        (8, 2, [5], 1),
        (8, 2, range(3), 3),
        (2, 4, range(2), 1),
        (4, 0, [1, 2], 2),
    ],
)
def test_a_process_has_a_share_of_the_cores_to_which_it_is_bound(
    cores: int, processes: int, own: list[int], expected: int
) -> None:
    assert cpus.share_of(cores, processes, own) == expected


def test_cores_of_processes() -> None:
    assert cpus.all_cores([{0, 1}, {1, 2}, (2, 7)]) == 4
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert cpus.own_cores() == {min(before)}
    finally:
        os.sched_setaffinity(0, before)


@pytest.mark.parametrize(
    ("groups", "files", "usable"),
    [
        ([("", "/")], {}, 8),
        ([("", "/")], {"cpu.max": "max 100000\n"}, 8),
        ([("", "/")], {"cpu.max": "250000 100000\n"}, 2),
        ([("", "/")], {"cpu.max": "50000 100000\n"}, 1),
        ([("", "/")], {"cpu.max": "9000000 100000\n"}, 8),
        ([("", "/a/b")], {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "300000 100000\n"}, 3),
        ([("", "/docker/123")], {"cpu.max": "400000 100000\n"}, 4),  # the path on the host
        ([("cpuset", "/"), ("cpu,cpuacct", "/a"), ("", "/")], {"cpu,cpuacct/a/cpu.cfs_quota_us": "-1\n"}, 8),
        (
            [("cpuset", "/"), ("cpu,cpuacct", "/a"), ("", "/")],
            {"cpu,cpuacct/a/cpu.cfs_quota_us": "600000\n", "cpu,cpuacct/a/cpu.cfs_period_us": "100000\n"},
            6,
        ),
        ([("cpuacct", "/"), ("", "/x")], {"unified/x/cpu.max": "500000 100000\n"}, 5),
    ],
    ids=str,
)
def test_the_quota_of_control_groups_limits_the_cores(
    groups: list[tuple[str, str]], files: dict[str, str], usable: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        if name.endswith("quota_us"):
            (tmp_path / name).with_name("cpu.cfs_period_us").write_text("100000\n")
    monkeypatch.setattr(cpus, "_CGROUPS", tmp_path)
    monkeypatch.setattr(cpus, "_own_groups", lambda: groups)
    monkeypatch.setattr(cpus, "own_cores", lambda: frozenset(range(3, 11)))
    assert cpus.usable_cores() == set(range(3, 3 + usable))


def test_cores_and_numa_nodes_as_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for node, cores in ((0, "0-3,8"), (1, "4-7"), (2, "")):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(cores + "\n")
    monkeypatch.setattr(cpus, "_NODES", tmp_path)
    monkeypatch.setattr(cpus, "usable_cores", lambda: frozenset({8, 2, 3, 5}))
    assert Binding.own().columns() == ("2-3,5,8", "0-1")
    monkeypatch.setattr(cpus, "_NODES", tmp_path / "missing")
    assert Binding.own().columns() == ("2-3,5,8", "-")


@pytest.mark.parametrize(
    ("cores", "host_cores", "crowded_hosts"),
    [
        ([(0,), (0,)], 4, ["a"]),
        ([(0,), (1,)], 4, []),
        ([(0, 1), (0, 1)], 4, []),
        ([(0,), (0,)], 1, []),  # as few cores as there are
        ([(0,)], 4, []),
        ([(0, 1)] * 3, 4, ["a"]),
        ([(0, 1)] * 3, 2, []),
    ],
)
def test_hosts_whose_ranks_share_too_few_cores(
    cores: list[tuple[int, ...]], host_cores: int, crowded_hosts: list[str]
) -> None:
    bindings = [Binding(each, (), host_cores) for each in cores]
    found = crowded([*("a" * len(cores)), "b"], [*bindings, Binding((0,), (), 4)])
    assert [line.split(" on ")[1][0] for line in found] == crowded_hosts
