"""Trained PyTorch modules: load, evaluate and predict agree with what training reported."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

import mpitrain

from ..support.launch import ROOT, Mpi, run


@pytest.fixture(scope="module")
def trained(openmpi: Mpi, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("trained")
    openmpi.train(2, ROOT / "jobs" / "torch_cnn.py", "--train-steps", "12", "--filters", "4", "--run-dir", run_dir)
    return run_dir


def test_load_returns_the_module(trained: Path) -> None:
    reported = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()][-1]
    images = mpitrain.data.mnist(None)
    batch = images.validation.read_batch(0, len(images.validation))
    module = mpitrain.load(trained)
    assert not module.training
    with torch.no_grad():
        outputs = module(torch.from_numpy(batch.examples) * torch.tensor(images.train.scale))
    loss = functional.cross_entropy(outputs.double(), torch.from_numpy(batch.labels).long())
    assert float(loss) == pytest.approx(reported["validation_loss"], rel=1e-6)
    copy = pickle.loads(pickle.dumps(module))  # nothing of the training remains in it
    assert copy.state_dict().keys() == module.state_dict().keys()
    assert all(isinstance(each, torch.nn.Parameter) and each.grad is None for each in module.parameters())


def test_commands_agree_with_what_training_reported(openmpi: Mpi, trained: Path, tmp_path: Path) -> None:
    reported = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()][-1]
    python = [str(openmpi.python), "-m", "mpitrain"]
    done = run([*python, "evaluate", str(trained), "--json"])
    assert json.loads(done.stdout)["validation_loss"] == pytest.approx(reported["validation_loss"], rel=1e-6)
    batch = mpitrain.data.mnist(None).validation.read_batch(0, 50)
    np.save(tmp_path / "in.npy", batch.examples)
    files = ["--input", str(tmp_path / "in.npy"), "--output", str(tmp_path / "out.npy")]
    done = run([*python, "predict", str(trained), *files])
    assert done.returncode == 0, done.stderr
    with torch.no_grad():
        examples = torch.from_numpy(batch.examples) * torch.tensor(mpitrain.data.mnist(None).train.scale)
        expected = mpitrain.load(trained)(examples).numpy()
    np.testing.assert_allclose(np.load(tmp_path / "out.npy"), expected, rtol=1e-5, atol=1e-6)
