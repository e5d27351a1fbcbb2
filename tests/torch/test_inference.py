"""Trained PyTorch modules: load, evaluate and predict agree with the values that training reported."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

import mpitrain
from mpitrain.errors import DataError

from ..support.launch import ROOT, Mpi, one_line, run
from ..support.world.controller import World

DATASET_JOB = """
import torch
from torch import nn
from torch.utils.data import Dataset

from mpitrain import Job, optim


class Random(Dataset):
    def __len__(self):
        return 20

    def __getitem__(self, index):
        return torch.rand(6), index % 2


def job() -> Job:
    return Job(model=nn.Linear(6, 2), loss=nn.CrossEntropyLoss(), optimizer=optim.sgd(0.1), train=Random())
"""


@pytest.fixture(scope="module")
def trained(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("trained")
    world.train(2, ROOT / "jobs" / "torch_cnn.py", "--train-steps", "12", "--filters", "4", "--run-dir", run_dir)
    return run_dir


def test_load_without_the_training_data_takes_the_module(world: World, tmp_path: Path) -> None:
    job_file, examples = tmp_path / "job.py", tmp_path / "examples"
    examples.touch()
    check = (
        f"    if not __import__('pathlib').Path({str(examples)!r}).exists():\n        raise DataError('no examples')\n"
    )
    job_file.write_text(
        "from mpitrain.errors import DataError\n" + DATASET_JOB.replace("    return Job(", check + "    return Job(")
    )
    world.train(1, job_file, "--train-steps", "2", "--batch-size", "5", "--run-dir", tmp_path / "run")
    weight = mpitrain.load(tmp_path / "run").weight
    examples.unlink()
    with pytest.raises(DataError, match=r"no examples.*model="):
        mpitrain.load(tmp_path / "run")
    assert torch.equal(mpitrain.load(tmp_path / "run", model=torch.nn.Linear(6, 2)).weight, weight)


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
    copy = pickle.loads(pickle.dumps(module))  # the module has no state of the training
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


def test_examples_that_the_module_refuses(openmpi: Mpi, job, tmp_path: Path) -> None:
    """The examples of a dataset may have any shape, so only the module can refuse an example."""
    openmpi.train(1, job(DATASET_JOB), "--train-steps", "2", "--batch-size", "4", "--run-dir", tmp_path / "run")
    np.save(tmp_path / "in.npy", np.zeros((5, 10), np.float32))
    words = ["predict", tmp_path / "run", "--input", tmp_path / "in.npy", "--output", tmp_path / "out.npy"]
    done = run([str(openmpi.python), "-m", "mpitrain", *map(str, words)])
    message = one_line(done.stderr)
    assert done.returncode == 2
    assert all(shape in message for shape in ("(4, 10)", "(1, 6)"))
    assert not (tmp_path / "out.npy").exists()
