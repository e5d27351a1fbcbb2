"""Parameter servers and modes that use them: no push is lost or applied twice, and no read is torn."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from ..support.launch import JOBS, PROGRAMS, Mpi
from ..support.results import SMALL, assert_close, assert_same_bits, final
from ..support.world.controller import World

PROGRAM = PROGRAMS / "servers.py"
PLAIN = ["--no-normalize"]  # only sync has BatchNorm statistics over all workers


def drive(
    world: World, workers: int, servers: int, what: str, mode: str, count: int, *, share: bool, one_sided: bool = True
):
    words = [what, mode, *map(str, (servers, count, int(share), int(one_sided)))]
    done = world.run(workers + servers, PROGRAM, *words, timeout=90)
    assert done.stdout.split()[-1:] == ["ok"], done.stdout


# The second MPI library runs fewer cases: the arithmetic is the same.
@pytest.mark.parametrize(
    ("name", "mode", "workers", "servers"),
    [
        *(("world", "async", *shape) for shape in ((4, 0), (4, 1), (2, 3))),
        *(("world", mode, 4, 1) for mode in ("ssp", "backup")),
        ("mpich_world", "backup", 4, 1),
        ("mpich_world", "async", 2, 3),
    ],
)
def test_every_push_counts_once_in_shared_memory(
    request: pytest.FixtureRequest, name: str, mode: str, workers: int, servers: int
) -> None:
    steps = 5_000 if mode != "backup" else 3_000
    drive(request.getfixturevalue(name), workers, servers, "pushes", mode, steps, share=True)


@pytest.mark.parametrize(
    ("name", "mode", "workers", "servers", "one_sided"),
    [
        *(("world", mode, 3, 2, True) for mode in ("async", "ssp", "backup")),
        *(("mpich_world", mode, 2, 1, True) for mode in ("async", "backup")),
        ("world", "async", 1, 3, True),
        ("world", "backup", 2, 2, False),
        ("mpich_world", "ssp", 3, 1, False),
    ],
)
def test_every_push_counts_once_between_nodes(
    request: pytest.FixtureRequest, name: str, mode: str, workers: int, servers: int, one_sided: bool
) -> None:
    world: World = request.getfixturevalue(name)
    drive(world, workers, servers, "pushes", mode, 300, share=False, one_sided=one_sided)


@pytest.mark.parametrize(("name", "workers", "servers"), [("world", 5, 0), ("world", 3, 3), ("mpich_world", 5, 1)])
def test_no_read_is_torn_in_shared_memory(
    request: pytest.FixtureRequest, name: str, workers: int, servers: int
) -> None:
    drive(request.getfixturevalue(name), workers, servers, "torn", "async", 10_000, share=True)


def test_no_read_is_torn_between_nodes(world: World) -> None:
    drive(world, 4, 2, "torn", "async", 200, share=False)


def train(world: World, n: int, run_dir: Path, *flags: str) -> dict[str, np.ndarray]:
    world.train(n, SMALL, "--run-dir", run_dir, *PLAIN, *flags, timeout=90)
    return final(run_dir)


@pytest.fixture(scope="module")
def one_process(world: World, tmp_path_factory: pytest.TempPathFactory):
    """A function that returns the result of a single process for a set of flags."""
    known: dict[tuple[str, ...], dict[str, np.ndarray]] = {}

    def get(*flags: str) -> dict[str, np.ndarray]:
        if flags not in known:
            known[flags] = train(world, 1, tmp_path_factory.mktemp("one"), *flags)
        return known[flags]

    return get


@pytest.mark.parametrize(
    ("n", "how", "what"),
    [
        (1, ("--mode", "async"), ("--clip-norm", "0.5")),
        (3, ("--mode", "async", "--ps", "2"), ()),
        (3, ("--mode", "async", "--ps", "2"), ("--clip-norm", "0.5")),
        (2, ("--mode", "ssp", "--ps", "1"), ("--optimizer", "momentum")),
        (2, ("--mode", "backup", "--ps", "1"), ()),
        (2, ("--mode", "backup", "--ps", "1"), ("--clip-norm", "0.5")),
        (1, ("--mode", "local", "--local-steps", "7"), ("--clip-norm", "0.5")),
        (1, ("--mode", "local", "--local-steps", "7"), ("--optimizer", "momentum")),
        (4, ("--mode", "async", "--ps", "3", "--no-shared-memory"), ()),
        (4, ("--mode", "async", "--ps", "3", "--no-shared-memory"), ("--clip-norm", "0.5")),
        (2, ("--mode", "backup", "--ps", "1", "--no-shared-memory", "--no-one-sided"), ("--optimizer", "momentum")),
    ],
    ids=str,
)
def test_with_one_worker_every_mode_is_one_process(
    world: World, n: int, how: tuple[str, ...], what: tuple[str, ...], one_process, tmp_path: Path
) -> None:
    assert_same_bits(train(world, n, tmp_path, *how, *what), one_process(*what))


@pytest.mark.parametrize("road", [(), ("--no-one-sided",)], ids=str)
def test_prefetched_parameters_are_at_most_one_step_older(
    world: World, road: tuple[str, ...], one_process, tmp_path: Path
) -> None:
    how = ("--mode", "async", "--ps", "2", "--no-shared-memory", "--prefetch-params", *road)
    prefetched = train(world, 3, tmp_path / "a", *how)
    *_, counts = (json.loads(line) for line in (tmp_path / "a" / "metrics.jsonl").read_text().splitlines())
    _, late, *later = counts["staleness_histogram"]
    assert late > 0 and not any(later)
    assert any(prefetched[name].tobytes() != values.tobytes() for name, values in one_process().items())
    # After a checkpoint, a worker reads the newest parameters; with a checkpoint after each step, they are never older.
    assert_same_bits(train(world, 3, tmp_path / "b", *how, "--save-steps", "1", "--keep", "2"), one_process())


@pytest.mark.parametrize(
    ("flags", "precision", "road", "tolerance"),
    [
        (("--dtype", "float64"), "float32", (), 1e-6),
        ((), "bfloat16", (), 3e-2),
        ((), "bfloat16", ("--no-one-sided",), 3e-2),
        ((), "float16", (), 3e-3),
    ],
    ids=str,
)
def test_pushes_in_fewer_bits_come_to_nearly_the_same(
    world: World, road, flags, precision: str, tolerance: float, one_process, tmp_path: Path
) -> None:
    flags = ("--optimizer", "momentum", *flags)
    how = ("--mode", "async", "--ps", "2", "--no-shared-memory", "--compress", precision, *road)
    found, exact = train(world, 3, tmp_path, *how, *flags), one_process(*flags)
    residual = found.pop("run/state/unsent gradients/residual")
    assert residual.any()
    assert_close(found, exact, tolerance)
    assert any(found[name].tobytes() != exact[name].tobytes() for name in found), "nothing was rounded"


@pytest.mark.parametrize(
    ("how", "what"),
    [
        ((), ()),
        (("--ps", "2"), ("--clip-norm", "0.5")),
        (("--ps", "1"), ("--optimizer", "lamb")),
        (("--ps", "2", "--no-shared-memory"), ("--clip-norm", "0.5")),
        (("--ps", "2", "--no-shared-memory", "--placement", "greedy"), ("--optimizer", "lars")),
        (("--ps", "2", "--no-shared-memory", "--no-one-sided"), ()),
    ],
    ids=str,
)
def test_backup_with_no_spare_worker_is_sync(
    world: World, how: tuple[str, ...], what: tuple[str, ...], one_process, tmp_path: Path
) -> None:
    batch = ("--batch-size", "4", "--dtype", "float64")
    servers = int(how[1]) if how else 0
    got = train(world, 3 + servers, tmp_path, "--mode", "backup", "--backup-workers", "0", *batch, *how, *what)
    assert_close(got, one_process("--batch-size", "12", "--dtype", "float64", *what), 1e-12)


def test_staleness_scaling_divides_the_rate(world: World, tmp_path: Path) -> None:
    """With one worker no gradient is stale, so scaling has no effect; with three workers, training converges."""
    flags = ("--mode", "async", "--staleness-scaling")
    assert_same_bits(train(world, 1, tmp_path / "a", *flags), train(world, 1, tmp_path / "b", "--mode", "async"))
    done = world.train(3, SMALL, *PLAIN, *flags, "--run-dir", tmp_path / "c")
    assert float(done.stdout.split("accuracy ")[-1].split()[0]) > 0.5


def test_an_epoch_is_each_example_once_at_any_pace(world: World, tmp_path: Path) -> None:
    for n, flags in ((3, ()), (4, ("--ps", "1")), (4, ("--ps", "1", "--no-shared-memory"))):
        folder = tmp_path / f"{n}{len(flags)}"
        words = ["--mode", "async", *flags, "--batch-size", "9", "--train-steps", "20", "--run-dir", folder]
        world.train(n, JOBS / "recording.py", *words)


@pytest.mark.parametrize("optimizer", ["lamb", "lars"])
def test_layers_lie_whole_on_servers_that_scale_their_steps(
    world: World, optimizer: str, one_process, tmp_path: Path
) -> None:
    what = ("--optimizer", optimizer, "--dtype", "float64")
    how = ("--mode", "async", "--ps", "2", "--placement", "greedy", "--no-shared-memory")
    assert_close(train(world, 3, tmp_path, *how, *what), one_process(*what), 1e-12)


@pytest.mark.parametrize("flags", [(), ("--no-one-sided",), ("--mode", "backup", "--clip-norm", "0.5")], ids=" ".join)
def test_more_servers_than_variables(world: World, flags: tuple[str, ...], job, tmp_path: Path) -> None:
    path = job(
        "from mpitrain import Job, data, nn, optim\n"
        "def job(clip_norm: float = 0.0):\n"
        "    d = data.mnist(None)\n"
        "    return Job(model=nn.Sequential(nn.Dense(64, 10)), loss=nn.SoftmaxCrossEntropy(), train=d.train,"
        " validation=d.validation, optimizer=optim.sgd(0.1, clip_norm=clip_norm or None), train_steps=50)\n"
    )
    words = ["--mode", "async", "--ps", "3", "--placement", "greedy", "--no-shared-memory"]
    done = world.train(5, path, *words, *flags, "--run-dir", tmp_path / "run")
    assert "50 steps in" in done.stdout


def test_backup_saves_by_the_clock_at_whole_steps(world: World, tmp_path: Path) -> None:
    flags = ("--mode", "backup", "--ps", "1", "--save-secs", "0.05", "--train-steps", "2000")
    train(world, 4, tmp_path, *flags)
    assert len(list((tmp_path / "checkpoints").iterdir())) > 2


@pytest.mark.quick
@pytest.mark.parametrize("how", [("--mode", "async"), ("--mode", "backup", "--backup-workers", "0")], ids=" ".join)
def test_a_resumed_run_continues_where_the_data_was(world: World, how: tuple[str, ...], tmp_path: Path) -> None:
    flags = (*how, "--ps", "1")
    whole = train(world, 2, tmp_path / "whole", *flags)
    train(world, 2, tmp_path / "parts", *flags, "--train-steps", "37")
    assert_same_bits(train(world, 2, tmp_path / "parts", *flags), whole)


def test_checkpoints_are_of_the_very_step(world: World, tmp_path: Path) -> None:
    train(world, 4, tmp_path, "--mode", "async", "--ps", "1", "--save-steps", "30")
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == [f"step-{step:010d}.h5" for step in (30, 60, 90, 100)]


@pytest.mark.quick
def test_local_steps_average(world: World, tmp_path: Path) -> None:
    """One local step of plain SGD, then the mean of parameters, gives the result of synchronous SGD."""
    what = ("--optimizer", "sgd", "--dtype", "float64", "--batch-size", "4")
    local = train(world, 3, tmp_path / "local", "--mode", "local", "--local-steps", "1", *what)
    sync = train(world, 3, tmp_path / "sync", *what)
    for name in ("params/dense1.weight", "params/dense2.weight"):
        np.testing.assert_allclose(local[name], sync[name], rtol=1e-9, atol=1e-12)


@pytest.mark.quick
def test_elastic_averaging_trains_the_center(world: World, tmp_path: Path) -> None:
    done = world.train(3, SMALL, *PLAIN, "--mode", "local", "--elastic-rho", "0.3", "--run-dir", tmp_path)
    assert float(done.stdout.split("accuracy ")[-1].split()[0]) > 0.5


def test_metrics_tell_staleness_and_shares(world: World, tmp_path: Path) -> None:
    world.train(4, SMALL, *PLAIN, "--mode", "async", "--ps", "1", "--log-steps", "20", "--run-dir", tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    logged = [line for line in lines if "loss" in line]
    assert logged
    assert all(line["staleness_max"] >= line["staleness_mean"] >= 0 for line in logged)
    (worker_stats,) = [line for line in lines if "workers" in line]
    assert [worker["worker"] for worker in worker_stats["workers"]] == [0, 1, 2]
    assert sum(worker["steps"] for worker in worker_stats["workers"]) == 100
    assert sum(worker_stats["staleness_histogram"]) == 100


@pytest.mark.parametrize("how", ["refused", "stuck"])
def test_where_windows_fail_messages_take_their_place(mpi: Mpi, how: str, one_process, tmp_path: Path) -> None:
    program = PROGRAMS / "without_windows.py"
    flags = ["--mode", "async", "--ps", "1", "--no-shared-memory", *PLAIN, "--run-dir", tmp_path]
    done = mpi.run(2, program, how, SMALL, *flags)
    assert done.returncode == 0, done.stderr
    assert "servers on other nodes are reached by messages: " in done.stdout
    assert_same_bits(final(tmp_path), one_process())


@pytest.mark.parametrize(("servers", "requests"), [(1, 2), (3, 6)])
@pytest.mark.parametrize("transport", ["--one-sided", "--no-one-sided"])
def test_a_step_takes_two_round_trips(
    openmpi: Mpi, transport: str, servers: int, requests: int, tmp_path: Path
) -> None:
    """One round trip sends the gradient, and one returns the next parameters, with all servers at the same time."""
    flags = ("--mode", "async", "--ps", str(servers), "--no-shared-memory", transport, "--run-dir", tmp_path)
    done = openmpi.train(servers + 1, JOBS / "counted_requests.py", *flags)
    assert f"{requests:.2f} requests per step" in done.stdout
