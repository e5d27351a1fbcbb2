"""The measurements of ``mpitrain data``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpitrain import Job, data, nn, optim
from mpitrain.cli.main import main
from mpitrain.plan.config import RunConfig
from mpitrain.training.data_survey import facts_of, measure

from ...support.launch import ROOT

FEATURES, CLASSES = 5, 3


def arrays(count: int = 60) -> data.Split:
    rng = np.random.default_rng(0)
    return data.from_arrays(rng.random((count, FEATURES), np.float32), np.arange(count) % CLASSES, CLASSES)


def slow(example: Any) -> Any:
    time.sleep(0.002)
    return example


def job(train: data.Split, units: int = 4) -> Job:
    model = nn.Sequential(nn.Dense(FEATURES, units), nn.ReLU(), nn.Dense(units, CLASSES))
    return Job(model, nn.SoftmaxCrossEntropy(), optim.sgd(0.1), train, batch_size=10)


NETWORK = job(arrays()).network


def test_facts_of_arrays() -> None:
    facts = facts_of("training", arrays(), NETWORK, np.float32)
    assert (facts.count, facts.bytes) == (60, 60 * (FEATURES * 4 + 8))
    assert facts.labels == {0: 20, 1: 20, 2: 20} and facts.labelled == 60
    assert [int(label) for _, label in facts.examples] == [0, 1, 2]


def test_facts_of_examples_that_are_loaded_one_by_one() -> None:
    split = data.dataset([{"text": "a b", "labels": index % 2} for index in range(7)])
    facts = facts_of("training", split, NETWORK, np.float32)
    assert facts.bytes is None and facts.labels == {0: 4, 1: 3}
    assert facts.examples[1] == {"text": "a b", "labels": 1}


def test_loading_that_limits_the_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(8))
    speed = measure(job(arrays().map(slow)), RunConfig(), 2, 0.1)
    assert speed.cores == 4 and speed.data_workers == 3  # more would be needed, but there are no more cores
    assert speed.loading < 500 < speed.computing


@pytest.mark.parametrize(("train", "units"), [(arrays(), 4), (arrays().map(lambda example: example), 1_000_000)])
def test_computing_that_limits_the_speed(train: data.Split, units: int) -> None:
    speed = measure(job(train, units), RunConfig(), 1, 0.3)
    assert speed.batch_bytes == 10 * (FEATURES * 4 + 8)
    assert speed.data_workers == 0


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    path: Path = ROOT / "jobs" / "mnist_mlp.py"
    assert main(["data", "--seconds", "0.05", str(path), "--hidden-units", "4"]) == 0
    assert "1,437" in capsys.readouterr().out
    assert main(["data", str(ROOT / "jobs" / "trainer_digits.py")]) == 2
