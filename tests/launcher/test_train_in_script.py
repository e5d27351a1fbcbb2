"""``mpitrain.train``: a script gives the results of the job file, however it is started, and ends correctly."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest

import mpitrain
from mpitrain import checkpoint, data
from mpitrain.errors import CheckpointError

from ..support.launch import PROGRAMS, Mpi, one_line, run
from ..support.results import SMALL, assert_same_bits, final
from ..support.world.controller import World

SCRIPT = PROGRAMS / "training_script.py"


def mpitrain_run(mpi: Mpi, *words: object) -> subprocess.CompletedProcess[str]:
    return run([str(mpi.python), "-m", "mpitrain", "run", "-n", "2", *map(str, words)])


def assert_trained(world: World, n: int, folder: Path, steps: int = 10) -> None:
    """Compare a script's run, and the outputs of its model, with a run of the job file."""
    flags = ["--hidden-units", "20", "--batch-size", "6", "--train-steps", str(steps), "--run-dir", folder / "expected"]
    world.train(n, SMALL, *flags)
    assert_same_bits(final(folder / "run"), final(folder / "expected"))
    examples = data.mnist(None).validation.read_batch(0, 50).examples
    expected = mpitrain.load(folder / "expected", averages=True)(examples)
    np.testing.assert_array_equal(np.load(folder / "outputs.npy"), expected)


def test_a_warning_of_a_script_is_printed_once(openmpi: Mpi, tmp_path: Path) -> None:
    script = tmp_path / "warning.py"
    script.write_text(
        "import warnings\nwarnings.warn('of the script')\n"
        f"import mpitrain\nmpitrain.train({str(SMALL)!r}, train_steps=2, batch_size=6)\n"
    )
    done = mpitrain_run(openmpi, "--run-dir", tmp_path / "run", script)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("of the script") == 1, done.stderr


def test_a_function_under_mpirun(mpi: Mpi, world: World, tmp_path: Path) -> None:
    done = mpi.run(2, SCRIPT, "function", tmp_path)
    assert done.returncode == 0, done.stderr
    assert_trained(world, 2, tmp_path)


def test_a_path_under_mpitrain_run_whose_flags_replace_options(openmpi: Mpi, world: World, tmp_path: Path) -> None:
    done = mpitrain_run(openmpi, "--train-steps", 15, SCRIPT, "path", tmp_path)
    assert done.returncode == 0, done.stderr
    assert_trained(world, 2, tmp_path, steps=15)
    assert "[False, " in (tmp_path / "done-0").read_text()  # rank 0 counts as finished only after its exit


def test_a_job_without_a_launcher(openmpi: Mpi, world: World, tmp_path: Path) -> None:
    done = run([str(openmpi.python), str(SCRIPT), "job", str(tmp_path)])
    assert done.returncode == 0, done.stderr
    assert_trained(world, 1, tmp_path)
    with pytest.raises(CheckpointError):  # loading must not run the script again
        mpitrain.load(tmp_path / "run")


def test_a_mistake_is_reported_once_or_raised(openmpi: Mpi, tmp_path: Path) -> None:
    done = openmpi.run(2, SCRIPT, "mistake", tmp_path)
    assert done.returncode == 2
    assert "hidden_units" in one_line(done.stderr)
    assert run([str(openmpi.python), str(SCRIPT), "mistake", str(tmp_path)]).returncode == 10
    done = run([str(openmpi.python), "-m", "mpitrain", "train", "--mode", "asynk", str(SCRIPT), "job", str(tmp_path)])
    assert done.returncode == 2
    one_line(done.stderr)


def test_two_trainings_in_one_script(openmpi: Mpi, tmp_path: Path) -> None:
    done = mpitrain_run(openmpi, SCRIPT, "twice", tmp_path)
    assert done.returncode == 0, done.stderr
    assert [final(tmp_path / name)["params/dense1.weight"].shape[1] for name in ("run", "second")] == [20, 10]


def test_a_signal_stops_and_saves(mpi: Mpi, tmp_path: Path) -> None:
    done = mpi.run(2, SCRIPT, "signal", tmp_path)
    assert done.returncode == 75, done.stderr
    assert 5 <= max(checkpoint.steps(tmp_path / "run" / "checkpoints")) < 10
    assert not (tmp_path / "outputs.npy").exists()


@pytest.mark.parametrize("supervised", [False, True])
def test_an_exception_after_training_on_one_rank_ends_all(openmpi: Mpi, supervised: bool, tmp_path: Path) -> None:
    words = SCRIPT, "raise", tmp_path
    done = mpitrain_run(openmpi, "--run-dir", tmp_path / "run", *words) if supervised else openmpi.run(2, *words)
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1
    if supervised:
        assert json.loads((tmp_path / "run" / "failure.json").read_text())["rank"] == 1


def test_the_status_of_a_script_that_has_trained(openmpi: Mpi, tmp_path: Path) -> None:
    assert mpitrain_run(openmpi, SCRIPT, "exit", tmp_path).returncode == 1
