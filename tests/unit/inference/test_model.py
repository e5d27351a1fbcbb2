"""Outputs and measures of trained layers, against the formulas of a softmax regression."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import mpitrain
from mpitrain import data
from mpitrain.core.layout import Array
from mpitrain.errors import ConfigError, DataError, JobError
from mpitrain.inference import model as module
from mpitrain.inference.model import evaluate, load
from mpitrain.plan.job import load_job_file

from ...support.trained_runs import CLASSES, EXAMPLES, FEATURES, TrainedRun


@pytest.fixture
def run(tmp_path: Path) -> TrainedRun:
    made = TrainedRun(tmp_path)
    made.record()
    return made


def measures(scores: Array, labels: Array) -> tuple[float, float]:
    """Return the mean cross-entropy and the accuracy."""
    logs = scores - np.log(np.exp(scores).sum(1, keepdims=True))
    return -float(logs[np.arange(len(labels)), labels].mean()), float((scores.argmax(1) == labels).mean())


@pytest.mark.parametrize("count", [1, 4, 10])
def test_outputs_do_not_depend_on_the_batches(run: TrainedRun, count: int) -> None:
    vectors = run.save(4)
    model: Any = load(run.path)
    images = np.random.default_rng(0).integers(0, 256, (count, FEATURES)).astype(np.uint8)
    expected = run.scores(vectors["params"], images / 255)
    found = model(images)
    assert found.shape == (count, CLASSES) and found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    scaled = (images / 255).astype(np.float64)  # floating-point numbers are used as they are
    np.testing.assert_allclose(model(scaled), expected, rtol=1e-4, atol=1e-5)
    assert model.step == 4 and model.path.name.startswith("step-")


def test_examples_that_a_model_does_not_accept(run: TrainedRun) -> None:
    run.save(4)
    model: Any = load(run.path)
    for examples in (np.zeros((0, FEATURES)), np.zeros(()), np.zeros((2, FEATURES + 1)), np.zeros(FEATURES)):
        with pytest.raises(JobError, match="shape"):
            model(examples.astype(np.uint8))
    predictor = model._predictor
    with pytest.raises(JobError, match=r"left \(2, 5\)"):
        predictor({"left": np.zeros((2, FEATURES)), "right": np.zeros((2, 1))})
    with pytest.raises(JobError, match=r"right \(3, 1\)"):
        predictor({"left": np.zeros((2, FEATURES)), "right": np.zeros((3, 1))})


def test_an_error_of_the_model_names_the_batch(run: TrainedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run.save(4)
    model: Any = load(run.path)

    def fails(batch: Any) -> Array:
        raise ArithmeticError("a reason\nin two lines")

    monkeypatch.setattr(model._predictor._model, "predict", fails)
    with pytest.raises(JobError) as error:
        model(np.zeros((3, FEATURES), np.uint8))
    text = str(error.value)
    assert "\n" not in text and all(part in text for part in ("(3, 5)", "ArithmeticError: a reason in two", "(1, 5)"))


def test_examples_must_have_the_type_that_transforms_give(run: TrainedRun) -> None:
    examples = [(image, 1) for image in np.zeros((8, FEATURES), np.uint8)]
    run.job.train = data.dataset(examples, classes=CLASSES).map(lambda pair: (np.float32(pair[0]) / 255, pair[1]))
    run.save(4)
    model: Any = load(run.path, model=run.job)
    assert model(np.zeros((2, FEATURES), np.float32)).shape == (2, CLASSES)
    with pytest.raises(JobError, match=r"uint8.*float32"):
        model(np.zeros((2, FEATURES), np.uint8))


def test_averages(run: TrainedRun) -> None:
    vectors = run.save(4, averages=True)
    ones = np.full((1, FEATURES), 255, np.uint8)
    for averages, name in ((True, "average"), (False, "params")):
        model: Any = load(run.path, averages=averages)
        np.testing.assert_allclose(model(ones), run.scores(vectors[name], ones / 255), rtol=1e-4, atol=1e-5)


def test_a_layer_is_no_job(run: TrainedRun) -> None:
    run.save(4)
    with pytest.raises(JobError, match="model=make_job"):
        load(run.path, model=mpitrain.nn.Dense(FEATURES, CLASSES))  # type: ignore[arg-type]


def test_data_that_is_missing_gets_advice(run: TrainedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: Any) -> Any:
        raise DataError("no file")

    run.save(4)
    monkeypatch.setattr(module, "restore", fails)
    with pytest.raises(DataError, match=r"no file.*model="):
        load(run.path)
    with pytest.raises(DataError, match=r"no file$"):
        load(run.path, model=run.job)


@pytest.mark.parametrize("maps", [False, True])
@pytest.mark.parametrize("options", [{}, {"accumulate_steps": 2}, {"dtype": "float64", "batch_size": 11}], ids=str)
def test_an_evaluation_is_that_of_all_validation_examples(tmp_path: Path, options: dict[str, Any], maps: bool) -> None:
    run = TrainedRun(tmp_path, {"measures": True, "maps": maps}, **options)
    run.record()
    vectors = run.save(6, averages=True)
    batch = load_job_file(run.job_file)().validation.read_batch(0, EXAMPLES)
    for averages, name in ((None, "average"), (False, "params")):
        step, found = evaluate(run.path, averages)
        scores = run.scores(vectors[name], batch.examples / 255)
        loss, accuracy = measures(scores, batch.labels)
        assert step == 6 and found["validation_loss"] == pytest.approx(loss, rel=1e-4)
        assert found["validation_accuracy"] == pytest.approx(accuracy)
        assert found["validation_two"] == (scores[:2].argmax(1) == batch.labels[:2]).mean()


def test_an_evaluation_needs_validation_examples(tmp_path: Path) -> None:
    run = TrainedRun(tmp_path, {"validates": False})
    run.record()
    run.save(4)
    with pytest.raises(ConfigError, match="validation"):
        evaluate(run.path)


@pytest.mark.parametrize(("batch", "parts", "expected"), [(12, 1, 12), (12, 5, 3), (1, 1, 1)])
def test_a_batch_is_as_large_as_a_micro_batch_of_training(batch: int, parts: int, expected: int) -> None:
    training = SimpleNamespace(batch_size=batch, accumulate_steps=parts)
    trained: Any = SimpleNamespace(config=SimpleNamespace(training=training))
    assert module._batch_size(trained) == expected
