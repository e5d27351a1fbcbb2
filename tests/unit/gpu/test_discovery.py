"""GPUs are assigned evenly, however a scheduler exposes them; requests for missing GPUs are refused."""

from __future__ import annotations

from collections import Counter

import pytest

from mpitrain.errors import ConfigError
from mpitrain.gpu.discovery import VisibleGpus, assign_gpus, check, describe
from mpitrain.plan.config import RunConfig

WHY = "no driver"


def node(index: int, *gpus_of_workers: list[str]) -> list[VisibleGpus]:
    return [VisibleGpus(index, f"n{index}", gpus, "" if gpus else WHY) for gpus in gpus_of_workers]


def taken(workers: list[VisibleGpus], count: int = 1) -> list[list[str]]:
    """Return the names of the GPUs that each worker gets."""
    shares = assign_gpus(workers, count, None)
    return [[worker.gpus[share.index] for share in own] for worker, own in zip(workers, shares, strict=True)]


def test_each_worker_takes_one_of_those_that_all_see() -> None:
    assert taken(node(0, ["a", "b"], ["a", "b"])) == [["a"], ["b"]]


def test_each_worker_takes_the_one_that_it_alone_sees() -> None:
    """With srun --gpus-per-task=1, the first GPU of each worker is a different GPU."""
    assert taken(node(0, ["b"], ["a"])) == [["b"], ["a"]]


def test_workers_that_see_different_ones_do_not_meet() -> None:
    assert taken(node(0, ["a"], ["a", "b"])) == [["a"], ["b"]]


def test_nodes_have_gpus_of_their_own() -> None:
    """GPUs of different nodes may have equal identifiers, for example in virtual machines."""
    assert taken([*node(0, ["a", "b"]), *node(1, ["a", "b"])]) == [["a"], ["a"]]


@pytest.mark.parametrize(("workers", "gpus", "count"), [(5, 2, 1), (3, 4, 2), (2, 3, 3), (1, 1, 2)])
def test_shares_are_fair_and_their_memory_adds_up(workers: int, gpus: int, count: int) -> None:
    names = [f"gpu{i}" for i in range(gpus)]
    shares = assign_gpus(node(0, *[names] * workers), count, None)
    load = Counter(share.index for own in shares for share in own)
    assert max(load.values()) - min(load[i] for i in range(gpus)) <= 1
    memory: Counter[int] = Counter()
    for own in shares:
        for index in {share.index for share in own}:
            memory[index] += next(share.fraction for share in own if share.index == index)
    assert all(part == pytest.approx(1) for part in memory.values())


def test_a_fraction_that_is_asked_for_is_taken() -> None:
    shares = assign_gpus(node(0, ["a"], ["a"]), 1, 0.25)
    assert [own[0].fraction for own in shares] == [0.25, 0.25]


def test_who_shares_and_who_has_none_is_reported() -> None:
    workers = [*node(0, ["a"], ["a"]), *node(1, [])]
    sharing, without = sorted(describe(workers, assign_gpus(workers, 1, None)), reverse=True)
    assert "2 workers on n0" in sharing and "1 GPU" in sharing
    assert "worker 2" in without and "n1" in without and WHY in without


def test_a_cupy_that_does_not_work_is_reported() -> None:
    workers = [VisibleGpus(0, "n0", [], "CuPy is installed but failed: no", is_broken=True)] * 2
    assert describe(workers, assign_gpus(workers, 1, None)) == [f"no GPU: {workers[0].why}"]


@pytest.mark.parametrize("gpus", [[], ["a"]])
def test_where_all_are_alike_there_is_nothing_to_tell(gpus: list[str]) -> None:
    workers = [*node(0, gpus), *node(1, gpus)]
    assert describe(workers, assign_gpus(workers, 1, None)) == []


@pytest.mark.parametrize(
    ("device", "soft", "workers", "expected"),
    [
        ("gpu", True, node(0, [], []), ["--device gpu", "n0", WHY, "--device auto or cpu"]),
        ("gpu", False, node(0, ["a"], []), ["--no-soft-placement", "1 of 2", "worker 1 on n0", WHY]),
        ("auto", False, node(0, [], []), ["--no-soft-placement", "no worker", "n0", WHY]),
        ("auto", False, [*node(0, ["a"]), *node(1, [])], ["--no-soft-placement", "1 of 2", "n1"]),
    ],
)
def test_what_is_refused(device, soft: bool, workers: list[VisibleGpus], expected: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        check(workers, RunConfig.of(device=device, soft_placement=soft))
    assert all(part in str(error.value) for part in expected)


@pytest.mark.parametrize(
    ("options", "workers", "expected"),
    [
        ({"precision": "tf32"}, node(0, []), ["--precision tf32", "no worker"]),
        ({"precision": "float16"}, node(0, ["a"], []), ["--precision float16", "worker 1 on n0", WHY]),
        ({"gpu_transport": "host"}, node(0, [], []), ["--gpu-transport host", "no worker"]),
    ],
)
def test_options_of_gpus_want_some(options: dict[str, str], workers: list[VisibleGpus], expected: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        check(workers, RunConfig.of(**options))
    assert all(part in str(error.value) for part in expected)
    check(node(0, ["a"], ["a"]), RunConfig.of(**options))


@pytest.mark.parametrize(
    ("device", "soft", "workers"),
    [
        ("auto", True, node(0, [], [])),
        ("auto", True, node(0, ["a"], [])),
        ("gpu", True, node(0, ["a"], [])),
        ("gpu", False, node(0, ["a"], ["a"])),
    ],
)
def test_what_is_not(device, soft: bool, workers: list[VisibleGpus]) -> None:
    check(workers, RunConfig.of(device=device, soft_placement=soft))
