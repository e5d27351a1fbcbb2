"""Whole runs: their output, their files, and job files that must work without changes."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

from mpitrain.process.signals import STOPPED_EARLY

from ..support.kills import ranks_of
from ..support.launch import JOBS, ROOT, Mpi, missing, run
from ..support.results import assert_same_bits, final
from ..support.waiting import limit, wait_until
from ..support.world.controller import World

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FASHION = Path("/usr/share/datasets/fashion-mnist")


def mpitrain(mpi: Mpi, *words: str | Path, **options: object):
    done = run([str(mpi.python), "-m", "mpitrain", *map(str, words)], **options)  # type: ignore[arg-type]
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.mark.quick
@pytest.mark.parametrize("name", ["mnist_mlp", "mnist_tutorial", "fashion_cnn"])
def test_job_files_learn_the_embedded_digits(mpi: Mpi, name: str, tmp_path: Path) -> None:
    done = mpitrain(mpi, "run", "-n", "2", ROOT / "jobs" / f"{name}.py", "--train-steps", "300", "--run-dir", tmp_path)
    assert float(done.stdout.split("accuracy ")[-1].split()[0]) > 0.9
    assert str(tmp_path) in done.stdout.splitlines()[-1]


@pytest.mark.parametrize("name", ["mnist_mlp", "mnist_tutorial", "fashion_cnn"])
def test_job_files_on_fashion_mnist(world: World, name: str, tmp_path: Path) -> None:
    if not FASHION.is_dir():
        missing("Debian's package dataset-fashion-mnist")
    flags = ["--data-dir", FASHION, "--train-steps", "60", "--run-dir", tmp_path]
    done = world.train(2, ROOT / "jobs" / f"{name}.py", *flags, timeout=120)
    assert float(done.stdout.split("accuracy ")[-1].split()[0]) > 0.6
    if name == "fashion_cnn":
        assert int(done.stdout.split(" parameters")[0].split()[-1].replace(",", "")) < 150_000


@pytest.mark.quick
def test_metrics_and_config(world: World, tmp_path: Path) -> None:
    flags = ["--run-dir", tmp_path, "--log-steps", "10", "--validate-steps", "40"]
    done = world.train(2, JOBS / "small.py", *flags, env={"TF_CONFIG": "{}"})
    assert "TF_CONFIG" in done.stdout
    printed = [int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("step ")]
    assert printed == [10, 40, 80, 100, 100]  # the first and the last report, and all validations
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    logged = [line for line in lines if "loss" in line]
    assert [line["step"] for line in logged] == list(range(10, 101, 10))
    assert all(line["examples_per_s"] > 0 and line["learning_rate"] == 0.01 for line in logged)
    assert [line["step"] for line in lines if "validation_accuracy" in line] == [40, 80, 100]
    assert [line["time_s"] for line in lines] == sorted(line["time_s"] for line in lines)
    config = tomllib.loads((tmp_path / "config.toml").read_text())
    assert config["run"]["batch_size"] == 12
    assert config["run"]["train_steps"] == 100
    assert config["job"]["hidden_units"] == 24
    assert "Open MPI" in config["versions"]["mpi"]


def test_a_runs_config_makes_the_run_again(world: World, tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    world.train(2, JOBS / "small.py", "--hidden-units", "8", "--seed", "5", "--run-dir", first)
    world.train(2, JOBS / "small.py", "--config", first / "config.toml", "--run-dir", second)
    assert_same_bits(final(second), final(first))


def test_losses_do_not_depend_on_the_number_of_ranks(world: World, tmp_path: Path) -> None:
    losses = []
    for n in (1, 3):
        folder = tmp_path / str(n)
        flags = ["--dtype", "float64", "--batch-size", str(12 // n), "--log-steps", "1", "--run-dir", folder]
        world.train(n, JOBS / "small.py", *flags)
        lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        losses.append([line["loss"] for line in lines if "loss" in line])
    assert len(losses[0]) == 100
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-9)


def test_hdf5_is_the_same_data(world: World, job, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    examples = rng.integers(0, 256, (300, 5, 4), np.uint8)
    labels = rng.integers(0, 3, 300)
    with h5py.File(tmp_path / "d.h5", "w") as file:
        file["images"], file["labels"] = examples, labels
    np.savez(tmp_path / "d.npz", examples=examples, labels=labels)
    path = job(f"""
from pathlib import Path
import numpy as np
from mpitrain import Job, data, nn, optim

FOLDER = Path({str(tmp_path)!r})

def job(hdf5: bool = False) -> Job:
    stored = np.load(FOLDER / "d.npz")
    train = (
        data.hdf5(FOLDER / "d.h5", classes=3) if hdf5
        else data.from_arrays(stored["examples"], stored["labels"], classes=3, scale=1 / 255)
    )
    return Job(
        model=nn.Sequential(nn.Flatten(), nn.Dense(20, 3)), loss=nn.SoftmaxCrossEntropy(),
        optimizer=optim.sgd(0.1), train=train, batch_size=7, train_steps=20,
    )
""")
    for name in ("hdf5", "no-hdf5"):
        world.train(3, path, f"--{name}", "--run-dir", tmp_path / name)
    assert_same_bits(final(tmp_path / "hdf5"), final(tmp_path / "no-hdf5"))


@pytest.mark.quick
def test_dry_run_prints_a_command_that_works(mpi: Mpi, tmp_path: Path) -> None:
    flags = ["--train-steps", "5", "--run-dir", tmp_path / "a run"]
    printed = mpitrain(mpi, "run", "-n", "2", "--dry-run", JOBS / "small.py", *flags).stdout
    done = run(shlex.split(printed))
    assert done.returncode == 0, done.stderr
    assert "2 workers" in done.stdout
    assert (tmp_path / "a run" / "checkpoints" / "step-0000000005.h5").exists()


@pytest.mark.quick
def test_alone_without_a_launcher(mpi: Mpi, tmp_path: Path) -> None:
    done = mpitrain(mpi, "train", JOBS / "small.py", "--train-steps", "5", "--run-dir", tmp_path)
    assert "1 worker on 1 node" in done.stdout


@pytest.mark.quick
def test_a_run_without_standard_output(openmpi: Mpi, job, tmp_path: Path) -> None:
    path = job("import warnings\nwarnings.warn('of the job file')\n" + (JOBS / "small.py").read_text())
    words = [str(openmpi.python), "-m", "mpitrain", "run", "-n", "2", str(path), "--train-steps", "5"]
    done = run(["sh", "-c", 'exec "$@" >&-', "sh", *words, "--run-dir", str(tmp_path / "run")])
    assert done.returncode == 0, done.stderr
    (line,) = done.stderr.splitlines()  # one line for all ranks
    assert "of the job file" in line


def test_a_run_without_a_home(openmpi: Mpi, tmp_path: Path) -> None:
    words = [str(openmpi.python), "-m", "mpitrain", "run", "-n", "1", str(JOBS / "small.py"), "--train-steps", "5"]
    done = run(["env", "-u", "HOME", *words, "--run-dir", str(tmp_path)], timeout=120)  # without a cache
    assert done.returncode == 0, done.stderr
    assert not done.stderr


@pytest.mark.quick
def test_help_lists_the_jobs_flags_and_the_runs(openmpi: Mpi) -> None:
    output = mpitrain(openmpi, "run", JOBS / "small.py", "--help").stdout
    for part in ("--hidden-units", "Width of the hidden layer", "--train-steps", "--dry-run"):
        assert part in output


def test_threads_follow_the_cores_and_the_user(openmpi: Mpi, tmp_path: Path) -> None:
    def threads(n: int, *flags: str, **env: str) -> int:
        done = openmpi.train(n, JOBS / "small.py", "--train-steps", "1", "--run-dir", tmp_path, *flags, env=env)
        return int(done.stdout.split(" thread")[0].split()[-1])

    cores = len(os.sched_getaffinity(0))
    assert threads(1) == cores
    assert threads(cores + 1) == 1
    assert threads(1, OMP_NUM_THREADS="3") == 3
    assert threads(1, "--threads", "2", OMP_NUM_THREADS="3") == 2


def test_sweep(openmpi: Mpi, tmp_path: Path) -> None:
    env = {"RUNS": str(tmp_path), "FLAGS": "--train-steps 50"}
    done = run([str(ROOT / "jobs" / "sweep.sh"), "2", "0.01", "0.001"], env=env)
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()[1:]] == ["0.01", "0.001"]
    assert "validation_accuracy" in done.stdout


def test_chain(openmpi: Mpi, tmp_path: Path) -> None:
    words = [str(ROOT / "jobs" / "chain.sh"), "2", str(tmp_path / "run"), str(JOBS / "small.py"), "--train-steps", "20"]
    for _ in range(2):  # the second run has no step left to train
        done = run(words)
        assert done.returncode == 0, done.stderr
        assert "step-0000000020.h5: ok" in done.stdout
        assert "at step 20: validation loss" in done.stdout
    with np.load(tmp_path / "run" / "parameters.npz") as arrays:
        assert len(arrays) == 9


@pytest.mark.quick
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_ending_run_ends_its_ranks(mpi: Mpi, number: signal.Signals, tmp_path: Path) -> None:
    words = [str(mpi.python), "-m", "mpitrain", "run", "-n", "2", str(ROOT / "jobs" / "mnist_mlp.py")]
    words += ["--train-steps", "100000000", "--run-dir", str(tmp_path), "--log-steps", "10"]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        try:
            metrics = tmp_path / "metrics.jsonl"
            wait_until(lambda: metrics.exists() and metrics.stat().st_size, "the run trains", process=process)
            process.send_signal(number)
            status = process.wait(timeout=limit(20))
        finally:
            process.kill()
        assert status == (-number if number == signal.SIGKILL else STOPPED_EARLY)
    wait_until(lambda: not ranks_of(tmp_path), "ranks are left behind", 10)


def test_runs_begun_in_the_same_second_have_folders_of_their_own(openmpi: Mpi, tmp_path: Path) -> None:
    words = [str(openmpi.python), "-m", "mpitrain", "train", str(JOBS / "small.py"), "--train-steps", "1"]
    processes = [subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.DEVNULL) for _ in range(4)]
    assert [process.wait(timeout=limit(60)) for process in processes] == [0] * 4
    folders = list((tmp_path / "runs").iterdir())
    assert len(folders) == 4
    assert all(len(list((folder / "checkpoints").iterdir())) == 1 for folder in folders)


def test_skipped_steps_are_reported(world: World, tmp_path: Path) -> None:
    flags = ["--nan", "skip", "--log-steps", "10", "--run-dir", tmp_path]
    world.train(2, JOBS / "diverging.py", *flags)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    logged = [line for line in lines if "loss" in line]
    assert [line.get("skipped_steps", 0) for line in logged] == [1, 0]
    assert all(line["loss"] is not None for line in logged)
