"""The end of runs with parameter servers, for various causes, and the CPU use of an idle server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from mpitrain.process import rank_status
from mpitrain.process.signals import STOPPED_EARLY

from ..support.kills import ranks_of
from ..support.launch import JOBS, ROOT, Mpi, one_line
from ..support.waiting import limit, wait_until
from ..support.world.controller import World

MLP = ROOT / "jobs" / "mnist_mlp.py"
SERVER_FLAGS = [
    ("--mode", "async", "--ps", "1"),
    ("--mode", "ssp", "--ps", "1", "--no-shared-memory"),
    ("--mode", "backup", "--ps", "1"),
    ("--mode", "backup", "--ps", "1", "--no-shared-memory"),
]


def trains(run_dir: Path) -> bool:
    metrics = run_dir / "metrics.jsonl"
    return metrics.exists() and metrics.stat().st_size > 0


@pytest.mark.parametrize(
    ("where", "flags"),
    [
        ("forward", SERVER_FLAGS[0]),
        ("hook", SERVER_FLAGS[1]),
        ("end", SERVER_FLAGS[1]),
        ("hook", SERVER_FLAGS[2]),
        ("forward", SERVER_FLAGS[3]),
    ],
    ids=str,
)
def test_a_worker_that_raises_ends_all(openmpi: Mpi, where: str, flags: tuple[str, ...], tmp_path: Path) -> None:
    words = ["-m", "mpitrain", "train", JOBS / "raising.py", "--where", where, "--run-dir", tmp_path, *flags]
    done = openmpi.run(4, *words, timeout=40)
    assert done.returncode == 1, done.stderr
    assert done.stderr.count("Traceback") == 1, done.stderr
    assert "on purpose" in done.stderr
    assert not ranks_of(tmp_path)


@pytest.mark.parametrize("flags", SERVER_FLAGS, ids=" ".join)
def test_nan_ends_all_with_one_line(openmpi: Mpi, flags: tuple[str, ...], tmp_path: Path) -> None:
    words = ["-m", "mpitrain", "train", JOBS / "diverging.py", "--run-dir", tmp_path, "--log-steps", "0", *flags]
    words += ["--train-steps", "1000000"]  # enough for the worker to reach its eighth batch
    done = openmpi.run(3, *words, timeout=40)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "the loss is nan" in one_line(done.stderr)


@pytest.mark.parametrize("flags", SERVER_FLAGS, ids=" ".join)
def test_nan_may_be_skipped(world: World, flags: tuple[str, ...], tmp_path: Path) -> None:
    words = ["--nan", "skip", "--train-steps", "1000", "--log-steps", "1000", "--validate-steps", "0", *flags]
    words += ["--repeat"]  # a gradient that is too late for its step is dropped, even if its loss is NaN
    world.train(3, JOBS / "diverging.py", *words, "--run-dir", tmp_path)
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert sum(record.get("skipped_steps", 0) for record in records) > 0
    losses = [record["validation_loss"] for record in records if "validation_loss" in record]
    assert losses and np.isfinite(losses).all()


@pytest.mark.parametrize(
    ("name", "flags"),
    [*(("openmpi", flags) for flags in (*SERVER_FLAGS, ("--mode", "local"))), ("mpich", SERVER_FLAGS[-1])],
)
def test_an_interrupt_leaves_no_process(
    request: pytest.FixtureRequest, name: str, flags: tuple[str, ...], tmp_path: Path
) -> None:
    mpi: Mpi = request.getfixturevalue(name)
    words = [str(mpi.python), "-m", "mpitrain", "run", "-n", "3", str(MLP), "--train-steps", "100000000"]
    words += ["--log-steps", "20", "--run-dir", str(tmp_path), *flags]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        try:
            wait_until(lambda: trains(tmp_path), "the run trains", process=process)
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=limit(20)) == STOPPED_EARLY
        finally:
            process.kill()
    wait_until(lambda: not ranks_of(tmp_path), lambda: ranks_of(tmp_path), 10)


@pytest.mark.quick
def test_a_killed_worker_is_named_and_nobody_claims_to_save(openmpi: Mpi, tmp_path: Path) -> None:
    words = [str(openmpi.python), "-m", "mpitrain", "run", "-n", "3", str(JOBS / "small.py"), "--no-normalize"]
    words += ["--train-steps", "100000000", "--log-steps", "0", "--run-dir", str(tmp_path), "--mode", "async"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            statuses = partial(rank_status.read, tmp_path)
            wait_until(lambda: sum(entry.step > 100 for entry in statuses()) == 3, statuses, process=process)
            os.kill(statuses()[2].pid, signal.SIGKILL)
            out, err = process.communicate(timeout=limit(10))
        finally:
            process.kill()
    assert process.returncode == 1
    assert "rank 2 of 3 (worker 2)" in one_line(err) and "signal 9" in err
    assert "to save" not in out


def cpu_share(pid: str, seconds: float) -> float:
    """Return the CPU use of a process during some seconds, as a fraction of one core."""

    def ticks() -> int:
        return sum(map(int, Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13]))

    began, before = time.monotonic(), ticks()
    time.sleep(seconds)
    return (ticks() - before) / os.sysconf("SC_CLK_TCK") / (time.monotonic() - began)


@pytest.mark.parametrize("sharing", ["--shared-memory", "--no-shared-memory"])
def test_an_idle_server_rests(mpi: Mpi, sharing: str, tmp_path: Path, job) -> None:
    path = job(
        "import time\nfrom mpitrain import Hook, Job, data, nn, optim\n"
        "class Rest(Hook):\n"
        "    def after_step(self, loop):\n"
        "        time.sleep(1)\n"
        "def job():\n"
        "    d = data.mnist(None)\n"
        "    return Job(model=nn.Sequential(nn.Dense(64, 10)), loss=nn.SoftmaxCrossEntropy(),"
        " optimizer=optim.sgd(0.1), train=d.train, train_steps=10000, hooks=[Rest()])\n"
    )
    words = [str(mpi.python), "-m", "mpitrain", "run", "-n", "2", str(path), "--mode", "async", "--ps", "1", sharing]
    words += ["--ps-placement", "first", "--log-steps", "1", "--run-dir", str(tmp_path / "run")]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            wait_until(lambda: trains(tmp_path / "run"), "the run trains", process=process)
            # Both ranks only wait, so neither may use much CPU time.
            ranks = [str(entry.pid) for entry in rank_status.read(tmp_path / "run")]
            assert len(ranks) == 2
            wait_until(lambda: max(cpu_share(pid, 1.5) for pid in ranks) < 0.3, "both rest", 15, process=process)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=limit(20))


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--staleness", "2"], "--mode ssp"),
        (["--mode", "backup", "--backup-workers", "2"], "--backup-workers is 2"),
        (["--mode", "async", "--ps", "2"], "--ps 2"),
        (["--mode", "async", "--ps", "1", "--ps-hosts", "nowhere"], "'nowhere'"),
        (["--mode", "async", "--no-shared-memory"], "--no-shared-memory"),
        (["--placement", "greedy"], "--placement"),
        (["--mode", "snyc"], "snyc"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_in_one_line(world: World, flags: list[str], expected: str, tmp_path: Path) -> None:
    assert expected in world.refusal(2, MLP, "--run-dir", tmp_path, *flags)


def test_batch_norm_over_all_workers_is_refused_where_they_do_not_wait(world: World, tmp_path: Path) -> None:
    line = world.refusal(2, JOBS / "small.py", "--mode", "async", "--run-dir", tmp_path)
    assert "BatchNorm(sync=False)" in line
