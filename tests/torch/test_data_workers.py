"""Examples that processes load: the bits do not depend on the number of processes, and errors end the run."""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from mpitrain import data
from mpitrain.data.orders import Sequential
from mpitrain.data.permutation import order
from mpitrain.process import rank_status
from mpitrain.process.pid import is_alive, parent_of, pid_start

from ..support.launch import ROOT, Mpi, missing, one_line, run
from ..support.waiting import limit, wait_until
from ..support.world.controller import World
from .reading import EXAMPLES, FAULTY
from .sources import KINDS, OF_OTHERS, all_kinds

SCRIPT = Path(__file__).parent / "reading.py"
PROGRAMS = ROOT / ".venv-programs" / "bin" / "python"  # has grain and datasets


def words(mpi: Mpi, n: int, out: Path, *flags: object, launch: tuple[object, ...] = ()) -> list[str]:
    out.mkdir(exist_ok=True)
    command = [mpi.python, "-m", "mpitrain", "run", "-n", n, "--run-dir", out / "run", *launch, SCRIPT, out, *flags]
    return [str(word) for word in command]


def read(
    world: World, n: int, out: Path, *flags: object, launch: tuple[object, ...] = ()
) -> list[dict[str, np.ndarray]]:
    """Run the script on ``n`` ranks; return the arrays that each worker has stored."""
    out.mkdir(exist_ok=True)
    world.train(n, "--run-dir", out / "run", *map(str, launch), SCRIPT, out, *map(str, flags), timeout=120)
    return [dict(np.load(path)) for path in sorted(out.glob("*.npz"))]


def assert_same(ours: list[dict[str, np.ndarray]], others: list[dict[str, np.ndarray]]) -> None:
    for one, other in zip(ours, others, strict=True):
        for name, values in one.items():
            np.testing.assert_array_equal(values, other[name], err_msg=name)


@pytest.fixture(scope="module")
def alone(world: World, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], list[dict[str, np.ndarray]]]:
    """Return a function that returns what a number of ranks store that load their examples themselves."""
    return functools.cache(lambda n: read(world, n, tmp_path_factory.mktemp("alone")))


@pytest.mark.parametrize("n", [1, 2, 3])
def test_any_number_of_processes_gives_the_same_bits(world: World, alone, n: int, tmp_path: Path) -> None:
    assert_same(alone(n), read(world, n, tmp_path, "--data-workers", 3))
    seen = np.concatenate([worker["seen"] for worker in alone(n)])
    assert sorted(seen) == sorted([*range(EXAMPLES)] * 3)
    assert alone(n)[0]["examples"] == EXAMPLES


@pytest.fixture(scope="module")
def killed(openmpi: Mpi, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return what a run on three ranks leaves behind, one of which was killed at step 6."""
    out = tmp_path_factory.mktemp("killed")
    done = run(words(openmpi, 3, out, "--kill-at", 6, launch=("--data-workers", 2)), timeout=120)
    assert done.returncode != 0
    return out


def test_a_killed_run_resumes_with_another_number(world: World, alone, killed: Path, tmp_path: Path) -> None:
    shutil.copytree(killed, tmp_path, dirs_exist_ok=True)
    resumed = read(world, 3, tmp_path, launch=("--data-workers", 3, "--prefetch", 1))
    assert_same(alone(3), resumed)
    steps = [json.loads(line)[0] for line in (tmp_path / "trained.jsonl").read_text().splitlines()]
    assert steps.count(4) == 3 and steps.count(5) == 6  # of three ranks, which have resumed after step 4


def test_a_killed_run_resumes_on_another_number_of_ranks(world: World, killed: Path, tmp_path: Path) -> None:
    shutil.copytree(killed, tmp_path, dirs_exist_ok=True)
    read(world, 2, tmp_path, launch=("--data-workers", 0))
    trained: dict[int, dict[int, list[int]]] = {}  # by step and number of ranks: the examples
    for line in (tmp_path / "trained.jsonl").read_text().splitlines():
        step, ranks, indices = json.loads(line)
        trained.setdefault(step, {}).setdefault(ranks, []).extend(indices)
    assert all(by_ranks.keys() == {3} for step, by_ranks in trained.items() if step <= 4)
    final = [trained[step][2 if 2 in trained[step] else 3] for step in sorted(trained)]
    assert sorted(index for indices in final for index in indices) == sorted([*range(EXAMPLES)] * 3)


@pytest.mark.parametrize("mode", ["local", "async", "backup"])
def test_every_example_is_used_once_in_every_mode(world: World, mode: str, tmp_path: Path) -> None:
    launch = ("--mode", mode, *(("--backup-workers", 0) if mode == "backup" else ()))
    workers = read(world, 2, tmp_path / "out", "--data-workers", 2, launch=launch)
    seen = np.concatenate([worker["seen"] for worker in workers])
    assert sorted(seen)[: EXAMPLES * 3] == sorted([*range(EXAMPLES)] * 3)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the files of each kind of source."""
    folder = tmp_path_factory.mktemp("sources")
    assert [kind for kind, split in all_kinds(folder) if len(split) != EXAMPLES] == []
    return folder


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_source_gives_each_example_once(world: World, kind: str, mode: str, sources: Path) -> None:
    out = sources / f"{kind} {mode}"
    workers = read(world, 2, out, "--source", kind, "--data-workers", 2, launch=("--mode", mode))
    seen = np.concatenate([worker["seen"] for worker in workers])
    assert sorted(seen)[: EXAMPLES * 3] == sorted([*range(EXAMPLES)] * 3)


@pytest.fixture(scope="module")
def programs(openmpi: Mpi) -> Iterator[World]:
    """Ranks that have other libraries."""
    if not PROGRAMS.exists():
        missing("the environment of programs: make .venv-programs/.done")
    world = World(openmpi, python=PROGRAMS)
    yield world
    world.close()


@pytest.mark.parametrize("kind", OF_OTHERS)
def test_datasets_of_other_libraries(programs: World, kind: str, tmp_path: Path) -> None:
    alone = read(programs, 2, tmp_path / "0", "--source", kind)
    assert_same(alone, read(programs, 2, tmp_path / "2", "--source", kind, "--data-workers", 2))
    seen = np.concatenate([worker["seen"] for worker in alone])
    assert sorted(seen) == sorted([*range(EXAMPLES)] * 3)


@pytest.mark.parametrize("kind", ["images", "rows"])
def test_a_source_with_transforms_resumes_with_the_same_bits(
    openmpi: Mpi, world: World, kind: str, sources: Path
) -> None:
    alone = read(world, 3, sources / f"{kind} whole", "--source", kind, "--data-workers", 0)
    killed = sources / f"{kind} killed"
    done = run(words(openmpi, 3, killed, "--source", kind, "--data-workers", 3, "--kill-at", 6), timeout=120)
    assert done.returncode != 0
    assert_same(alone, read(world, 3, killed, "--source", kind, "--data-workers", 1))


def test_examples_in_order(world: World, tmp_path: Path) -> None:
    (worker,) = read(world, 1, tmp_path / "out", "--in-order", "--data-workers", 2)
    assert worker["seen"].tolist() == [*range(EXAMPLES)] * 3


def test_the_order_of_a_split() -> None:
    split = data.from_arrays(np.zeros((5, 2)), np.arange(5))
    np.testing.assert_array_equal(split.order(3, 4, 1), order(3, 4, 5, 1))
    assert split.ordered(Sequential()).order(3, 4, 1).tolist() == [3, 4, 0, 1]


@pytest.mark.parametrize("workers", [0, 2])
def test_an_example_that_cannot_be_loaded_is_named(openmpi: Mpi, workers: int, tmp_path: Path) -> None:
    done = run(words(openmpi, 2, tmp_path / "out", "--fault", "raise", "--data-workers", workers), timeout=60)
    assert done.returncode == 2
    message = one_line(done.stderr)
    assert f"example {FAULTY} " in message and "broken.png" in message and str(SCRIPT) in message


@pytest.mark.parametrize("number", ["-1", "1.5"])
def test_a_number_of_processes_that_is_not_valid(world: World, number: str, tmp_path: Path) -> None:
    message = world.refusal(1, "--run-dir", tmp_path / "run", SCRIPT, tmp_path, "--data-workers", number)
    assert f"num_workers={number}" in message


def test_a_killed_process_ends_the_run(openmpi: Mpi, tmp_path: Path) -> None:
    done = run(words(openmpi, 2, tmp_path / "out", "--fault", "kill", "--data-workers", 2), timeout=60)
    assert done.returncode == 2
    assert "Sentences" in one_line(done.stderr)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_process_outlives_its_rank(openmpi: Mpi, number: signal.Signals, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = words(openmpi, 1, out, "--fault", "wait", "--data-workers", 2, "--epochs", 50)
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        waiting = out / "waiting-0"
        wait_until(lambda: waiting.exists() and len(_loading(out)) >= 2, lambda: _loading(out), process=process)
        rank, loading = rank_status.read(out / "run")[0].pid, _loading(out)
        starts = {pid: pid_start(pid) for pid in [*loading, rank]}
        if number == signal.SIGTERM:  # batch systems send SIGTERM to all processes
            for pid in starts:
                os.kill(pid, number)
            assert process.wait(limit(60)) == 75
        else:
            os.kill(rank, number)
            assert process.wait(limit(60)) not in (0, 75)
        wait_until(lambda: not any(is_alive(*each) for each in starts.items()), lambda: starts, 30)
    finally:
        process.kill()
        process.wait()


def _loading(out: Path) -> list[int]:
    """Return the process ids of the processes that load examples for the rank."""
    ranks = [status.pid for status in rank_status.read(out / "run")]
    pids = [int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdecimal()]
    return [pid for pid in pids if parent_of(pid) in ranks]


def test_a_split_can_be_read_after_training(world: World, tmp_path: Path) -> None:
    (script := tmp_path / "script.py").write_text(
        "import numpy as np, torch, mpitrain\n"
        "from mpitrain import data\n"
        "model = torch.nn.Linear(2, 2)\n"
        "trainer = mpitrain.Trainer(model, torch.optim.SGD(model.parameters(), 0.1))\n"
        "split = data.from_arrays(np.ones((12, 2), np.float32), np.arange(12) % 2).map(lambda example: example)\n"
        "loader = trainer.loader(split, 3)\n"
        "for _ in trainer.epochs(1):\n"
        "    for x, y in loader:\n"
        "        trainer.backward(torch.nn.functional.cross_entropy(model(x), y))\n"
        "        trainer.step()\n"
        "print('sum', split.read_batch(0, 12).examples[0].sum(), split.sample_digest())\n"
    )
    assert "sum 24" in world.train(2, "--run-dir", tmp_path / "run", script).stdout


def test_workers_that_call_different_methods_end_with_one_line(world: World, tmp_path: Path) -> None:
    (script := tmp_path / "script.py").write_text(
        "import torch, mpitrain\n"
        "model = torch.nn.Linear(2, 2)\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "trainer = mpitrain.Trainer(model, optimizer)\n"
        "for step in trainer.steps(4):\n"
        "    trainer.backward(model(torch.ones(3, 2)).sum())\n"
        "    trainer.step()\n"
        "    if trainer.rank == 0:\n"
        "        trainer.mean(1.0)\n"
        "    else:\n"
        "        optimizer.state_dict()\n"
    )
    assert "state_dict" in world.refusal(2, "--run-dir", tmp_path / "run", script)
