"""Values of a checkpoint in a PyTorch module."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from mpitrain import Job, checkpoint, data, optim  # noqa: E402
from mpitrain.errors import CheckpointError, JobError  # noqa: E402
from mpitrain.inference.model import Predictor, load  # noqa: E402
from mpitrain.inference.restore import restore  # noqa: E402
from mpitrain.pytorch.buffers import Buffers  # noqa: E402
from mpitrain.pytorch.network import layout_of  # noqa: E402


def make_module() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def saved(folder: Path, module: nn.Module) -> Path:
    """Write a checkpoint of a module's values, and of averages that are twice as large; return its path."""
    layout = layout_of(module)
    vectors = {name: np.zeros(layout.size, np.float32) for name in ("params", "average")}
    for name, view in layout.views(vectors["params"]).items():
        view[...] = module.state_dict()[name].numpy()
    vectors["average"] = 2 * vectors["params"]
    path = checkpoint.path_for(folder, 7)
    snapshot = checkpoint.Snapshot(vectors, 7, 0, Buffers(module).extra_state())
    checkpoint.write(path, layout, snapshot, 0, {})
    return path


@pytest.fixture
def module() -> nn.Sequential:
    torch.manual_seed(1)
    made = make_module()
    made[1].running_mean += 3
    made[1].num_batches_tracked += 5
    return made


def test_a_module_gets_the_values(module: nn.Sequential, tmp_path: Path) -> None:
    path = saved(tmp_path, module)
    for given in (path, tmp_path, str(path)):
        other = make_module()
        found = load(given, model=other)
        assert found is other and not other.training
        for name, value in module.state_dict().items():
            assert torch.equal(other.state_dict()[name], value), name
    averaged = load(path, model=make_module(), averages=True)
    assert torch.equal(averaged[0].weight, 2 * module[0].weight)


def test_a_module_of_another_shape_is_refused(module: nn.Sequential, tmp_path: Path) -> None:
    path = saved(tmp_path, module)
    with pytest.raises(CheckpointError, match="does not match"):
        load(path, model=nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)))


def test_the_module_of_a_job_is_returned_and_predicts(module: nn.Sequential, tmp_path: Path) -> None:
    path = saved(tmp_path, module)
    split = data.from_arrays(np.zeros((8, 3), np.float32), np.zeros(8, np.int64))

    def job() -> Job:
        loss, rule = nn.CrossEntropyLoss(), optim.sgd(0.1)
        return Job(make_module(), loss, rule, split, batch_size=4, train_steps=2)

    given = job()
    found = load(path, model=given)
    assert found is given.model and not found.training and torch.equal(found[0].weight, module[0].weight)
    examples = torch.randn(5, 3)
    predictor = Predictor(restore(path, job()))
    with torch.no_grad():
        expected = module.eval()(examples)
    np.testing.assert_allclose(predictor(examples.numpy()), expected.numpy(), rtol=1e-5, atol=1e-6)
    with pytest.raises(JobError, match=r"\(4,\)"):
        predictor(np.zeros((2, 4), np.float32))
