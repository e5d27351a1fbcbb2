"""A module with its loss before training: its layout and values, its optimizer, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from mpitrain import Job, data, optim  # noqa: E402
from mpitrain.errors import JobError  # noqa: E402
from mpitrain.pytorch.buffers import Buffers  # noqa: E402
from mpitrain.pytorch.network import LossInLoop, LossOfModel, TorchNetwork, layout_of, load_values  # noqa: E402

SPLIT = data.from_arrays(np.zeros((8, 3), np.float32), np.zeros(8, np.int64))


def rule(optimizer: object, model: nn.Module) -> optim.Optimizer:
    return Job(model=model, loss=nn.CrossEntropyLoss(), optimizer=optimizer, train=SPLIT).rule  # type: ignore[arg-type]


def test_an_optimizer_and_a_function_give_the_same_rule() -> None:
    model = nn.Linear(3, 2)
    found = rule(torch.optim.RMSprop(model.parameters(), 0.01, alpha=0.5), model)
    assert found == rule(lambda params: torch.optim.RMSprop(params, 0.01, alpha=0.5), model)
    assert found.slots == ("square_avg",) and found.rate(0) == 0.01
    assert rule(optim.sgd(0.1), model) == optim.sgd(0.1)


@pytest.mark.parametrize("optimizer", [lambda params: None, lambda params: torch.optim.LBFGS(params), 0.1, None])
def test_anything_else_is_refused(optimizer: object) -> None:
    with pytest.raises(JobError):
        rule(optimizer, nn.Linear(3, 2))


def network(model: nn.Module, loss: Any = None) -> TorchNetwork:
    return TorchNetwork(model, loss or nn.CrossEntropyLoss())


def test_an_optimizer_that_has_taken_steps_is_refused() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    with pytest.raises(JobError, match="Adam"):
        rule(optimizer, model)


@pytest.mark.parametrize(
    ("outputs", "expected"),
    [
        (torch.tensor(3.0), 3),
        ({"loss": torch.tensor([4.0])}, 4),
        ((torch.tensor(5.0), torch.ones(2)), 5),
        ([torch.tensor(6.0)], 6),
        (SimpleNamespace(loss=torch.tensor(7.0)), 7),
        (type("Named", (tuple,), {"loss": torch.tensor(8.0)})((1, 2)), 8),
        ({"logits": torch.ones(1)}, None),
        (torch.ones(2), None),
        (SimpleNamespace(logits=torch.ones(1)), None),
        (None, None),
        (3.0, None),
    ],
    ids=range(11),
)
def test_the_loss_that_a_module_returns(outputs: Any, expected: float | None) -> None:
    if expected is None:
        with pytest.raises(JobError, match="loss"):
            LossOfModel()(outputs, None)
    else:
        assert LossOfModel()(outputs, None).item() == expected


@pytest.mark.parametrize(
    ("loss", "named"),
    [
        (nn.MSELoss, "MSELoss()"),
        ("mse", "'mse'"),
        (nn.MSELoss(reduction="sum"), "'sum'"),
        (nn.Sequential(nn.Linear(2, 2), nn.MSELoss()), "Sequential"),
    ],
)
def test_losses_that_are_refused(loss: Any, named: str) -> None:
    with pytest.raises(JobError) as error:
        TorchNetwork(nn.Linear(3, 2), loss)
    assert named in str(error.value)


class Parts(nn.Module):
    """Has shared and frozen parameters, and buffers of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3)
        self.last.weight = self.first.weight
        self.first.bias.requires_grad_(False)
        self.register_buffer("mask", torch.tensor([1.0, torch.inf, 3.0]))

    def forward(self, x: Any) -> Any:
        return self.last(self.norm(self.first(x)))


def test_a_layout_has_each_tensor_once() -> None:
    layout = layout_of(Parts())
    params = {entry.name: entry.shape for entry in layout.entries if entry.kind == "param"}
    assert params == {
        "first.weight": (3, 3), "first.bias": (3,), "norm.weight": (3,), "norm.bias": (3,), "last.bias": (3,)
    }  # fmt: skip
    states = [entry.name for entry in layout.entries if entry.kind == "state"]
    assert states == ["norm.running_mean", "norm.running_var"] and layout.aliases["last.weight"] == "first.weight"
    own = network(Parts())
    assert own.frozen == ["first.bias"] and own.starts(layout) == [e.start for e in layout.entries if e.kind == "param"]
    assert own.components() == [
        ("first", "Linear", "weight 3x3, bias 3"),
        ("norm", "BatchNorm1d", "weight 3, bias 3"),
        ("last", "Linear", "weight 3x3, bias 3"),
    ]


def test_values_of_a_vector_are_those_of_the_module() -> None:
    model, other = Parts(), Parts()
    layout = layout_of(model)
    model.norm.running_mean += 2
    model.norm.num_batches_tracked += 5
    vector = np.full(layout.size, 9.0, np.float32)
    network(model).initialize(layout, vector, 0)
    assert not vector[layout.gaps()].any()
    load_values(other, layout, vector, Buffers(model).extra_state())
    for name, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name
    assert all(parameter.is_leaf for parameter in other.parameters())


def test_trying_a_module_changes_neither_its_buffers_nor_its_modes() -> None:
    model = Parts()
    model.norm.momentum = 1.0
    before = {name: value.clone() for name, value in model.state_dict().items()}
    places = [buffer.data_ptr() for buffer in model.buffers()]
    own = network(model.eval())
    layout = own.lay_out(SPLIT, np.float32)
    assert layout == layout_of(model) and model.training  # a module in evaluation mode is put in training mode
    own.check_validation(SPLIT, np.float32)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [buffer.data_ptr() for buffer in model.buffers()] == places and model.training
    own.lay_out(SPLIT, np.float64)
    assert model.first.weight.dtype == model.norm.running_mean.dtype == torch.float64


@pytest.mark.parametrize(
    ("make", "dtype", "named"),
    [
        (lambda: nn.Linear(3, 2).half(), "float32", "weight is torch.float16"),
        (lambda: nn.Linear(3, 2).double(), "float32", "float64"),
        (lambda: nn.Linear(3, 2).bfloat16(), "float64", "bfloat16"),
        (lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2).double()), "float64", "1.weight is torch.float64"),
        (lambda: nn.Linear(3, 2, device="meta"), "float32", "meta"),
        (lambda: nn.Linear(4, 2), "float32", "(2, 3)"),
    ],
    ids=range(6),
)
def test_modules_that_are_refused(make: Any, dtype: str, named: str) -> None:
    with pytest.raises(JobError) as error:
        network(make()).lay_out(SPLIT, np.dtype(dtype))
    assert named in str(error.value)


def test_parameters_that_are_all_bfloat16_take_inputs_in_bfloat16() -> None:
    batch = SPLIT.read_batch(0, 2)
    for model, dtype in ((nn.Linear(3, 2).bfloat16(), torch.bfloat16), (nn.Linear(3, 2), torch.float32)):
        inputs = network(model).inputs_of(batch, np.float32)
        assert inputs.args[0].dtype == dtype and inputs.labels.dtype == torch.int64


def test_the_digest_depends_on_the_initial_parameters() -> None:
    facts = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        facts.append(network(nn.Linear(3, 2)).facts())
    assert facts[0] == facts[1] != facts[2] and facts[0]["loss"] == "CrossEntropyLoss"


def test_statistics_are_synchronized_only_in_training() -> None:
    model = nn.Sequential(nn.SyncBatchNorm(3), nn.BatchNorm1d(3))
    assert network(model).synchronizes_statistics and not network(nn.Sequential(model[1])).synchronizes_statistics
    model[0].eval()
    assert not network(model).synchronizes_statistics


def test_a_loop_of_ones_own_needs_shapes_and_computes_no_loss() -> None:
    own = network(nn.Linear(3, 2), LossInLoop())
    assert own.has_own_loop and own.lay_out(SPLIT, np.float32) == layout_of(own.model)
    with pytest.raises(JobError):
        own.criterion(torch.ones(2), torch.ones(2))
    with pytest.raises(JobError, match="lazy"):
        network(nn.LazyLinear(2), LossInLoop()).lay_out(SPLIT, np.float32)
