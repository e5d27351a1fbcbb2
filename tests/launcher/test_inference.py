"""Trained models: load, evaluate and predict agree with the values that training reported."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import mpitrain
from mpitrain.errors import CheckpointError, JobError
from mpitrain.plan.job import load_job_file

from ..support.launch import JOBS, Mpi, one_line, run
from ..support.results import SMALL


@pytest.fixture(scope="module")
def trained(openmpi: Mpi, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on two ranks, with a moving average, and a job file that may change afterwards."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "widths.py").write_text("HIDDEN = 24\n")
    job_file = folder / "a_job.py"
    job_file.write_text("import widths\nassert widths.HIDDEN == 24\n" + SMALL.read_text())
    flags = ["--hidden-units", "20", "--train-steps", "60", "--run-dir", folder / "run"]
    openmpi.train(2, job_file, *flags)
    return folder


def reported(run_dir: Path) -> dict[str, float]:
    """Return the last validation that the run has reported."""
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "validation_loss" in line][-1]


def measures(outputs: np.ndarray, labels: np.ndarray) -> tuple[float, float]:
    """Return the mean cross-entropy and the accuracy of scores."""
    scores = outputs.astype(np.float64)
    log_sums = np.log(np.exp(scores - scores.max(axis=1, keepdims=True)).sum(axis=1)) + scores.max(axis=1)
    losses = log_sums - scores[np.arange(len(labels)), labels]
    return float(losses.mean()), float((scores.argmax(axis=1) == labels).mean())


def mpitrain_command(openmpi: Mpi, *words: str | Path, status: int = 0):
    done = run([str(openmpi.python), "-m", "mpitrain", *map(str, words)])
    assert done.returncode == status, done.stdout + done.stderr
    return done


def test_the_outputs_of_load_give_the_reported_loss(trained: Path) -> None:
    digits = mpitrain.data.mnist(None).validation.read_batch(0, 360)
    model = mpitrain.load(trained / "run", averages=True)
    loss, accuracy = measures(model(digits.examples), digits.labels)
    assert loss == pytest.approx(reported(trained / "run")["validation_loss"], rel=1e-6)
    assert accuracy == reported(trained / "run")["validation_accuracy"]
    assert model.step == 60
    scaled = digits.examples.astype(np.float32) * np.float32(mpitrain.data.mnist(None).train.scale)
    np.testing.assert_allclose(model(scaled), model(digits.examples), rtol=1e-5, atol=1e-5)
    assert not np.allclose(mpitrain.load(trained / "run")(digits.examples), model(digits.examples))


def test_commands_agree_with_what_training_reported(openmpi: Mpi, trained: Path, tmp_path: Path) -> None:
    done = mpitrain_command(openmpi, "evaluate", trained / "run", "--json")
    found, expected = json.loads(done.stdout), reported(trained / "run")
    assert found["step"] == expected["step"]
    for name in ("validation_loss", "validation_accuracy"):
        assert found[name] == pytest.approx(expected[name], rel=1e-6)
    digits = mpitrain.data.mnist(None).validation.read_batch(0, 360)
    np.save(tmp_path / "in.npy", digits.examples)
    files = ["--input", tmp_path / "in.npy", "--output", tmp_path / "out.npy"]
    mpitrain_command(openmpi, "predict", trained / "run", "--averages", *files)
    loss, _ = measures(np.load(tmp_path / "out.npy"), digits.labels)
    assert loss == pytest.approx(expected["validation_loss"], rel=1e-6)
    one_line(mpitrain_command(openmpi, "predict", trained / "run", *files, status=2).stderr)  # the output exists


def test_layers_are_passed_as_a_job(trained: Path) -> None:
    with pytest.raises(JobError, match="model=make_job"):
        mpitrain.load(trained / "run", model=mpitrain.nn.Dense(64, 10))  # type: ignore[arg-type]


def test_a_changed_job_file_does_not_matter(trained: Path, tmp_path: Path) -> None:
    job_file, digits = trained / "a_job.py", mpitrain.data.mnist(None).validation.read_batch(0, 5)
    before = mpitrain.load(trained / "run")(digits.examples)
    original = job_file.read_text()
    try:
        job_file.write_text("raise RuntimeError('changed')\n")
        np.testing.assert_array_equal(mpitrain.load(trained / "run")(digits.examples), before)
    finally:
        job_file.write_text(original)


def test_a_checkpoint_elsewhere_needs_its_job(trained: Path, tmp_path: Path) -> None:
    source = next((trained / "run" / "checkpoints").glob("step-*.h5"))
    (tmp_path / "copy.h5").write_bytes(source.read_bytes())
    with pytest.raises(CheckpointError, match="model="):
        mpitrain.load(tmp_path / "copy.h5")
    function = load_job_file(JOBS / "small.py")
    with pytest.raises(CheckpointError, match="does not match"):
        mpitrain.load(tmp_path / "copy.h5", model=function())
    model = mpitrain.load(tmp_path / "copy.h5", model=function(hidden_units=20))
    assert model(np.zeros((3, 64), np.uint8)).shape == (3, 10)


@pytest.mark.parametrize(
    ("examples", "reason"),
    [(np.zeros((3, 65), np.uint8), "shape"), (np.zeros((0, 64), np.uint8), "shape"), (np.float32(1), "shape")],
)
def test_examples_of_another_shape(trained: Path, examples: np.ndarray, reason: str) -> None:
    with pytest.raises(JobError, match=reason):
        mpitrain.load(trained / "run")(examples)


@pytest.mark.parametrize("content", ["pickled", "text", "nothing", "two arrays"])
def test_inputs_that_are_no_arrays(openmpi: Mpi, trained: Path, content: str, tmp_path: Path) -> None:
    path = tmp_path / "in.npy"
    if content == "pickled":
        np.save(path, np.array([{}], dtype=object), allow_pickle=True)
    elif content == "text":
        path.write_text("1,2,3\n")
    elif content == "two arrays":
        with path.open("wb") as file:
            np.savez(file, a=np.zeros((3, 64)), b=np.zeros((3, 64)))
    words = ["predict", trained / "run", "--input", path, "--output", tmp_path / "out.npy"]
    one_line(mpitrain_command(openmpi, *words, status=2).stderr)
    assert not (tmp_path / "out.npy").exists()


def test_evaluation_needs_validation_examples(openmpi: Mpi, tmp_path: Path) -> None:
    job_file = tmp_path / "without.py"
    job_file.write_text(SMALL.read_text().replace("validation=digits.validation,", ""))
    openmpi.train(1, job_file, "--train-steps", "2", "--run-dir", tmp_path / "run")
    one_line(mpitrain_command(openmpi, "evaluate", tmp_path / "run", status=2).stderr)


def test_examples_without_the_transforms_of_training_are_refused(openmpi: Mpi, tmp_path: Path) -> None:
    job_file = tmp_path / "transformed.py"
    job_file.write_text(
        """import numpy as np
from mpitrain import Job, data, nn, optim


def scaled(example):
    return np.float32(example[0]) / 255, example[1]


def job() -> Job:
    images = np.zeros((8, 4), np.uint8)
    return Job(
        model=nn.Dense(4, 3),
        loss=nn.SoftmaxCrossEntropy(),
        optimizer=optim.sgd(0.1),
        train=data.dataset([(image, 1) for image in images], classes=3).map(scaled),
        batch_size=4,
        train_steps=2,
    )
"""
    )
    openmpi.train(1, job_file, "--run-dir", tmp_path / "run")
    model = mpitrain.load(tmp_path / "run")
    assert model(np.zeros((2, 4), np.float32)).shape == (2, 3)
    with pytest.raises(JobError, match="uint8"):
        model(np.zeros((2, 4), np.uint8))
