"""The job of a run, made from the run's record, with the values of a checkpoint."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from mpitrain import checkpoint
from mpitrain.core.layout import Layout
from mpitrain.data.batch import Batch
from mpitrain.errors import CheckpointError
from mpitrain.inference.restore import restore

from ...support.trained_runs import FEATURES, TrainedRun


@pytest.fixture
def run(tmp_path: Path) -> TrainedRun:
    made = TrainedRun(tmp_path, seed=5, dtype="float64")
    made.record()
    return made


def test_a_checkpoint_has_its_values_and_the_options_of_the_run(run: TrainedRun) -> None:
    vectors = {step: run.save(step) for step in (4, 8)}
    for path, step in ((run.path, 8), (checkpoint.path_for(run.path / "checkpoints", 4), 4)):
        found = restore(path)
        np.testing.assert_array_equal(found.params, vectors[step]["params"])
        assert (found.step, found.layout.entries) == (step, run.layout.entries)
        assert (found.config.training.seed, found.config.training.dtype) == (5, "float64")
        assert found.config.training.batch_size == 4
    with pytest.raises(CheckpointError):
        restore(run.path / "nowhere")


def test_the_model_computes_with_these_values(run: TrainedRun) -> None:
    vectors = run.save(4)
    examples = np.random.default_rng(0).standard_normal((6, FEATURES))
    outputs = restore(run.path).model().predict(Batch(examples, None, 0))
    np.testing.assert_allclose(outputs, run.scores(vectors["params"], examples), rtol=1e-12)


def test_averages_are_used_if_there_are_any(run: TrainedRun) -> None:
    first, second = run.save(4), run.save(8, averages=True)
    with_averages = [restore(run.path, averages=choice).params for choice in (None, True, False)]
    for found, name in zip(with_averages, ("average", "average", "params"), strict=True):
        np.testing.assert_array_equal(found, second[name])
    older = checkpoint.path_for(run.path / "checkpoints", 4)
    np.testing.assert_array_equal(restore(older, averages=None).params, first["params"])
    with pytest.raises(CheckpointError):
        restore(older, averages=True)


def test_the_job_has_the_recorded_arguments(tmp_path: Path) -> None:
    run = TrainedRun(tmp_path, {"bias": False})
    run.record()
    run.save(4)
    assert len(restore(run.path).layout.entries) == 1
    run.arguments["bias"] = True  # the run was started again later
    run.record(4)
    assert len(restore(run.path).layout.entries) == 1, "the record of the start that wrote the checkpoint counts"


def test_a_job_file_that_has_changed_is_replaced_by_its_copy(run: TrainedRun) -> None:
    run.save(4)
    run.job_file.write_text("raise RuntimeError('changed')\n")
    assert restore(run.path).job.batch_size == 4


def test_modules_beside_the_job_file_can_be_imported(tmp_path: Path) -> None:
    run = TrainedRun(tmp_path)
    (run.job_file.parent / "beside_the_job.py").write_text("BIAS = False\n")
    text = run.job_file.read_text().replace("bias=bias", "bias=beside_the_job.BIAS")
    run.job_file.write_text(f"import beside_the_job\n{text}")
    run.record()
    entries = run.layout.entries
    run.layout = Layout.pack([(entry.name, entry.shape, entry.kind) for entry in entries if "bias" not in entry.name])
    run.save(4)
    before = list(sys.path)
    assert len(restore(run.path).layout.entries) == 1
    assert sys.path == before
    del sys.modules["beside_the_job"]


def test_a_job_that_is_passed_needs_no_record(tmp_path: Path) -> None:
    run = TrainedRun(tmp_path)
    vectors = run.save(4)
    with pytest.raises(CheckpointError, match="model="):
        restore(run.path)
    found = restore(run.path, run.job)
    np.testing.assert_array_equal(found.params, vectors["params"])
    assert found.job is run.job and found.config.training.dtype == "float32"
    run.options["seed"] = 9
    run.record()
    assert restore(run.path, run.job).config.training.seed == 9


def test_a_script_has_no_job(tmp_path: Path) -> None:
    run = TrainedRun(tmp_path)
    run.job_file.write_text("import mpitrain\n\ntrainer = mpitrain.Trainer()\n")
    run.record()
    run.save(4)
    with pytest.raises(CheckpointError, match=r"a_job\.py.*model="):
        restore(run.path)


@pytest.mark.parametrize(("recorded", "expected"), [({}, False), ({"flush_denormals": True}, True)])
def test_runs_of_older_versions_did_not_flush_denormals(
    tmp_path: Path, recorded: dict[str, bool], expected: bool
) -> None:
    run = TrainedRun(tmp_path, **recorded, mode="async", ps=2, threads=1000)
    run.record()
    run.save(4)
    config = restore(run.path).config
    assert config.device.flush_denormals is expected
    assert (config.options()["mode"], config.options()["threads"]) != ("async", 1000)  # not a part of the model


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    run = TrainedRun(tmp_path, {"hidden": 2})
    run.arguments["hidden"] = 0
    run.record()
    run.save(4)
    with pytest.raises(CheckpointError, match="does not match"):
        restore(run.path)
