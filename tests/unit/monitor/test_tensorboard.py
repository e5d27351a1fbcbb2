"""TensorBoard's reader finds the written TensorBoard events."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing import event_accumulator

from mpitrain.errors import ConfigError
from mpitrain.monitor import tensorboard
from mpitrain.monitor.tensorboard import Events


def read(folder: Path):
    found = event_accumulator.EventAccumulator(str(folder), size_guidance=dict.fromkeys(("scalars", "histograms"), 0))
    found.Reload()
    return found


def test_scalars(tmp_path: Path) -> None:
    events = Events(tmp_path)
    for step in (10, 20):
        events.scalars(step, {"loss": step / 7, "learning_rate": 0.1, "staleness_mean": 1.5, "of_a_hook": 3})
    events.scalars(
        20, {"validation_loss": 0.25, "validation_accuracy": 0.5, "validation_auc": 0.9, "note": "text is no scalar"}
    )
    events.close()
    events.close()
    found = read(tmp_path)
    assert sorted(found.Tags()["scalars"]) == [
        "accuracy/validation",
        "auc/validation",
        "learning_rate/learning_rate",
        "loss/training",
        "loss/validation",
        "measured/of_a_hook",
        "staleness/mean",
    ]
    assert [(e.step, e.value) for e in found.Scalars("loss/training")] == [
        (10, pytest.approx(10 / 7)),
        (20, pytest.approx(20 / 7)),
    ]
    assert [e.step for e in found.Scalars("accuracy/validation")] == [20]


def test_histograms_count_every_finite_element(tmp_path: Path) -> None:
    weight = np.random.default_rng(0).normal(size=(30, 40)).astype(np.float32)
    holed = weight.copy()
    holed[0, :3] = np.nan, np.inf, -np.inf
    events = Events(tmp_path)
    events.histograms(5, "parameters", {"dense.weight": weight, "dense.bias": np.zeros(1), "empty": np.zeros(0)})
    events.histograms(5, "gradients", {"dense.weight": holed, "none": np.full(3, np.nan)})
    events.close()
    found = read(tmp_path)
    assert sorted(found.Tags()["histograms"]) == [
        "gradients/dense.weight",
        "parameters/dense.bias",
        "parameters/dense.weight",
    ]
    (whole,), (part,) = found.Histograms("parameters/dense.weight"), found.Histograms("gradients/dense.weight")
    value = whole.histogram_value
    assert (whole.step, value.num, sum(value.bucket)) == (5, 1200, 1200)
    assert (value.min, value.max) == (pytest.approx(weight.min()), pytest.approx(weight.max()))
    assert value.sum == pytest.approx(weight.sum(dtype=float), abs=1e-3)
    assert part.histogram_value.num == 1197


def test_accounts_of_workers_and_staleness(tmp_path: Path) -> None:
    events = Events(tmp_path)
    workers = [{"worker": i, "steps": 10 * i, "staleness_mean": 0.5 * i} for i in range(2)]
    events.scalars(9, {"workers": workers, "staleness_histogram": [0, 5, 0, 2]})
    events.scalars(10, {"staleness_histogram": [0, 0]})
    events.close()
    found = read(tmp_path)
    assert [e.value for e in found.Scalars("worker1/staleness_mean")] == [0.5]
    (histogram,) = found.Histograms("staleness/histogram")
    value = histogram.histogram_value
    assert (value.num, value.min, value.max, value.sum) == (7, 1, 3, 11)


def test_what_an_interrupted_attempt_wrote_beyond_the_resume_is_forgotten(tmp_path: Path) -> None:
    for begin, value in ((0, 1.0), (20, 2.0)):
        events = Events(tmp_path)
        events.begin(begin)
        for step in range(begin + 10, begin + 40, 10):
            events.scalars(step, {"loss": value})
        events.close()
        later = max(tmp_path.iterdir())
        later.rename(tmp_path / f"events.out.tfevents.{begin:010d}")  # both were made in the same second
    found = read(tmp_path)
    assert [(e.step, e.value) for e in found.Scalars("loss/training")] == [
        (10, 1.0),
        (20, 1.0),
        (30, 2.0),
        (40, 2.0),
        (50, 2.0),
    ]


def test_a_missing_package_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensorboard, "available", lambda: False)
    with pytest.raises(ConfigError, match=r"pip install 'mpitrain\[tensorboard\]'"):
        Events(tmp_path)


FULL = """
import logging, resource, signal, sys
from pathlib import Path
from mpitrain.monitor.tensorboard import Events
logging.basicConfig(level=logging.WARNING)
events = Events(Path(sys.argv[1]))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))
for step in range(2000):
    events.scalars(step, {"loss": 1.0, "learning_rate": 2.0})
events.close()
print("went on")
"""


def test_a_file_that_cannot_grow_ends_the_events_and_not_the_run(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "went on\n"), done.stderr
    assert [line.split(":")[0] for line in done.stderr.splitlines()] == ["WARNING"]
    assert "Traceback" not in done.stderr
    assert 0 < sum(path.stat().st_size for path in tmp_path.iterdir()) <= 20000
