"""Rows of the table of features in the guide "Training a PyTorch module", most of them against a plain torch loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.nn.utils import prune  # noqa: E402
from torch.utils.data import DataLoader, IterableDataset  # noqa: E402

from mpitrain import Job, data, optim  # noqa: E402
from mpitrain.data.batch import Batch  # noqa: E402
from mpitrain.data.split import Split  # noqa: E402
from mpitrain.errors import DataError, JobError  # noqa: E402
from mpitrain.pytorch import linear  # noqa: E402
from mpitrain.pytorch.batches import as_split  # noqa: E402

from ...support.torch_modules import (  # noqa: E402
    Call,
    Counter,
    Growing,
    Last,
    Masked,
    Overwriting,
    Regularized,
    Repeating,
    SeveralInputs,
    Square,
    Tied,
    WithEmpty,
    adapted,
    blocks,
    checkpointed,
    mlp,
    of_scores,
    penalized,
    scaled,
    sloped,
)
from ...torch.support import SEED, Local, assert_same_training  # noqa: E402

rng = np.random.default_rng(3)
X, Y = rng.standard_normal((40, 6)), rng.integers(0, 3, 40)


def making(model: Callable[[], nn.Module], loss: Any = None, train: object = None, **more: object) -> Callable[[], Job]:
    """Return a function that makes a job with SGD; by default a classification of X."""

    def make() -> Job:
        return Job(
            model=model(),
            loss=loss or nn.CrossEntropyLoss(),
            optimizer=optim.sgd(0.01),
            train=train or data.from_arrays(X, Y),
            **more,  # type: ignore[arg-type]
        )

    return make


class Records:
    """A dataset of dicts, or of tuples."""

    def __init__(self, as_dict: bool) -> None:
        self.as_dict = as_dict

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> object:
        left, right, label = torch.from_numpy(X[index]), torch.from_numpy(X[index, :2]), int(Y[index])
        return {"left": left, "right": right, "labels": label} if self.as_dict else (left, right, label)


class Stream(IterableDataset[object]):
    """A dataset without indices."""

    def __iter__(self) -> Iterator[object]:
        return iter(())


@pytest.mark.parametrize("bucket_bytes", [0, 1 << 20])
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(making(Tied), id="tied weights and nested modules"),
        pytest.param(making(SeveralInputs, of_scores, Records(as_dict=False)), id="several inputs as a tuple"),
        pytest.param(making(SeveralInputs, of_scores, Records(as_dict=True)), id="several inputs as a dict"),
        pytest.param(making(mlp), id="nothing special"),
        pytest.param(making(lambda: nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(3))), id="lazy modules"),
        pytest.param(making(lambda: Call(blocks(), checkpointed(False))), id="gradient checkpointing"),
        pytest.param(making(lambda: Call(blocks(), checkpointed(True))), id="reentrant checkpointing"),
        pytest.param(making(lambda: Call(mlp(), lambda m, x: Square.apply(m(x)))), id="a custom function"),
        pytest.param(making(lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 3))), id="weight normalization"),
        pytest.param(making(lambda: nn.utils.weight_norm(nn.Linear(6, 3))), id="the older weight normalization"),
        pytest.param(making(lambda: Call(mlp(), adapted)), id="a gradient step in the forward pass"),
        pytest.param(making(lambda: Call(mlp(), lambda m, x: torch.func.vmap(m)(x))), id="a vectorized module"),
        pytest.param(making(lambda: mlp(nn.BatchNorm1d(8))), id="running statistics"),
        pytest.param(making(lambda: mlp(nn.SyncBatchNorm(8, affine=False))), id="synchronized without parameters"),
        pytest.param(
            making(lambda: Call(mlp(), penalized), lambda outputs, labels: outputs), id="a gradient in the loss"
        ),
        pytest.param(making(Regularized), id="a weight used twice"),
        pytest.param(making(lambda: Call(mlp(), scaled)), id="a functional call with other weights"),
        pytest.param(making(lambda: Call(blocks(), sloped)), id="a gradient in the backward pass"),
        pytest.param(making(lambda: prune.random_unstructured(nn.Linear(6, 3), "weight", 0.5)), id="pruning"),
        pytest.param(making(Repeating), id="a layer used a varying number of times"),
        pytest.param(making(Growing), id="a buffer that grows"),
        pytest.param(making(WithEmpty), id="an empty parameter"),
        pytest.param(making(lambda: nn.Sequential(nn.Unflatten(1, (2, 3)), nn.LSTM(3, 3), Last())), id="an LSTM"),
    ],
)
@pytest.mark.parametrize("directly", [False, True])
def test_a_module_trains_as_in_a_plain_loop(
    make: Callable[[], Job], bucket_bytes: int, directly: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if directly:  # the path that only large linear layers take otherwise
        monkeypatch.setattr(linear, "LEAST_ELEMENTS", 1)
    ours = assert_same_training(make, bucket_bytes=bucket_bytes)
    assert ours.starts == sorted(ours.starts, reverse=True) and ours.starts[-1] == 0


class WithLoss(SeveralInputs):
    """Computes its loss from labels, and returns the loss in one of the forms that modules use."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, left: Tensor, right: Tensor, labels: Tensor | None = None) -> Any:
        outputs = super().forward(left, right)
        loss = None if labels is None else of_scores(outputs, labels)
        return {
            "tensor": loss,
            "tuple": (loss, outputs["scores"]),
            "dict": {"loss": loss, **outputs},
            "object": SimpleNamespace(loss=loss, logits=outputs["scores"]),
        }[self.how]


@pytest.mark.parametrize(
    ("how", "as_dict"), [("tensor", False), ("tuple", True), ("dict", False), ("dict", True), ("object", True)]
)
def test_a_module_may_compute_its_loss(how: str, as_dict: bool) -> None:
    records = Records(as_dict=as_dict)

    def make() -> Job:
        return Job(model=WithLoss(how), loss=None, optimizer=optim.sgd(0.01), train=records, validation=records)

    ours, other = Local(make), Local(making(SeveralInputs, of_scores, records))
    ours.train()
    other.train()
    np.testing.assert_array_equal(ours.params, other.params)
    batch = records_batch(records)
    assert ours.model.evaluate(batch)[0] == other.model.evaluate(batch)[0]


@pytest.mark.parametrize(
    ("pair", "turn"),
    [
        (pair, turn)
        for turn in (1, -1)
        for pair in [
            ({"x": 1.0, "label": 1}, {"x": 1.0, "label": 1, "more": 2}),
            ((torch.ones(2), 1), (torch.ones(2), 1.5)),
            ((torch.ones(2), 1), (torch.ones(3), 1)),
            ((torch.ones(2), 1), (torch.ones(2, dtype=torch.int64), 1)),
            ((np.ones(2), 1), (np.ma.masked_equal(np.ones(2), 1), 1)),
            ((np.ones(2), "a"), (np.ones(2), 1)),
        ]
    ],
)
def test_torch_collates_examples_that_are_alike(pair: tuple[Any, Any], turn: int) -> None:
    first, second = pair[::turn]
    split = as_split([first, first, second])
    with pytest.raises(DataError, match="example 0") as caught:
        split.load(np.arange(3), 0, 0)
    assert "\n" not in str(caught.value)


def test_integers_without_dimensions_are_int64(tmp_path: Path) -> None:
    table = pa.table({"x": pa.array([[1.0], [2.0]], pa.list_(pa.float32())), "label": pa.array([1, 0], pa.int8())})
    pa.parquet.write_table(table, tmp_path / "t.parquet")
    batch = as_split(data.parquet(tmp_path / "t.parquet")).load(np.arange(2), 0, 0).examples
    assert (batch["x"].dtype, batch["label"].dtype) == (torch.float32, torch.int64)


def test_integers_beyond_int64_are_refused() -> None:
    job = Job(nn.Linear(1, 1), nn.MSELoss(), optim.sgd(0.1), data.from_arrays(np.uint64([[2**63]]), np.ones((1, 1))))
    with pytest.raises(DataError, match=str(2**63)):
        Local(lambda: job, batch_size=1).train()


def records_batch(records: Records) -> Batch:
    split = as_split(records)
    assert isinstance(split, Split)
    return split.read_batch(0, 8)


@pytest.mark.parametrize(
    "model", [mlp(), Call(mlp(), lambda m, x, labels: {"logits": m(x)}), Call(mlp(), lambda m, x, labels: m(x))]
)
def test_a_module_without_a_loss_is_refused(model: nn.Module) -> None:
    with pytest.raises(JobError, match="loss"):
        Local(lambda: Job(model=model, loss=None, optimizer=optim.sgd(0.01), train=data.from_arrays(X, Y)))


def test_a_compiled_module_trains() -> None:
    compiled = making(lambda: torch.compile(mlp(), backend="eager"))
    ours = Local(compiled)
    assert [entry.name for entry in ours.plan.layout.entries] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    ours.train()
    expected = assert_same_training(making(mlp))
    np.testing.assert_allclose(ours.params, expected.params, atol=1e-12)


def test_frozen_parameters_do_not_change_until_they_are_thawed() -> None:
    def make() -> Job:
        job = making(mlp)()
        job.model[0].requires_grad_(False)
        job.optimizer = optim.adamw(0.01, weight_decay=0.1)
        return job

    ours = Local(make, bucket_bytes=0)
    before = ours.state()
    ours.train(3)
    frozen = ours.state()
    assert np.array_equal(frozen["0.weight"], before["0.weight"])  # not even by weight decay
    assert not np.array_equal(frozen["2.weight"], before["2.weight"])
    ours.job.model[0].requires_grad_(True)
    ours.job.model[2].requires_grad_(False)
    ours.train(3)
    after = ours.state()
    assert not np.array_equal(after["0.weight"], frozen["0.weight"])
    assert np.array_equal(after["2.weight"], frozen["2.weight"])


def test_an_unused_parameter_has_a_gradient_of_zero() -> None:
    ours = Local(making(lambda: Call(blocks(), lambda m, x: m[2](m[0](x)))), bucket_bytes=0)
    ours.grads[:] = 9
    ours.step(0)
    views = ours.plan.layout.views(ours.grads)
    assert not views["module.1.0.weight"].any() and views["module.0.weight"].any()


def test_buffers_are_part_of_the_state() -> None:
    ours = assert_same_training(making(Counter))
    state = ours.model.extra_state()
    assert state.keys() == {"buffers", "transient"}
    buffers = state["buffers"].values
    assert buffers.keys() == {"seen", "norm.num_batches_tracked"}  # without "constant", which never changes
    assert buffers["seen"].tolist() == [80, 80] and buffers["norm.num_batches_tracked"] == 20
    assert state["transient"].values.keys() == {"largest"}
    assert "norm.running_mean" in ours.state()
    grown = Local(making(Growing))
    grown.step(0)
    again = Local(making(Growing))
    again.model.load_extra_state(grown.model.extra_state())
    assert again.job.model.mask.shape == (6,)
    other = Local(making(Counter))
    other.model.load_extra_state(state)
    assert other.job.model.seen.tolist() == [80, 80]
    assert np.array_equal(other.job.model.largest, ours.job.model.largest)


def test_buffers_that_are_not_finite_are_kept() -> None:
    ours = assert_same_training(making(Masked))
    assert np.isfinite(ours.params).all()
    stored = ours.model.extra_state()["buffers"].values
    assert stored.keys() == {"mask", "first"}
    assert np.array_equal(stored["mask"], Masked().mask) and np.isfinite(stored["first"]).all()


def test_modes_and_hooks_of_the_user_stay() -> None:
    calls: list[bool] = []

    def make() -> Job:
        job = making(lambda: mlp(nn.BatchNorm1d(8)))()
        job.model[1].eval()
        job.model[3].register_forward_hook(lambda module, inputs, output: calls.append(module.training))
        return job

    ours = Local(make)
    ours.train(2)
    ours.model.evaluate(ours.loader.batch(0, 4))
    ours.step(2)
    # The last four calls; earlier ones are from the check of the model before training.
    assert calls[-4:] == [True, True, False, True] and not ours.job.model[1].training
    assert not ours.plan.layout.views(ours.params)["1.running_mean"].any()


@pytest.mark.parametrize("devices", [1, 2])
def test_random_numbers_depend_on_the_position_in_the_data(devices: int) -> None:
    def losses(first: int) -> list[float]:
        ours = Local(making(lambda: mlp(nn.Dropout(0.5))), devices_per_rank=devices)
        return [float(ours.accumulation.forward(ours.loader.batch(4 * index, 4), [4])) for index in range(first, 6)]

    assert losses(0)[3:] == losses(3)
    assert len(set(losses(0))) == 6


def test_the_accuracy_is_that_of_the_largest_score() -> None:
    ours = Local(making(mlp))
    batch = ours.loader.batch(0, 40)
    loss, weight, correct, predictions = ours.model.evaluate(batch)
    assert weight == predictions == 40
    outputs = ours.job.model(torch.from_numpy(batch.examples))
    assert correct == int((outputs.argmax(1).numpy() == batch.labels).sum())
    assert loss == pytest.approx(40 * functional.cross_entropy(outputs, torch.from_numpy(batch.labels)).item())


@pytest.mark.parametrize("parts", [2, 3])
def test_accumulated_gradients_are_those_of_the_batch(parts: int) -> None:
    assert_same_training(making(mlp), accumulate_steps=parts, bucket_bytes=0)


def test_synchronized_statistics_in_bfloat16() -> None:
    ours = Local(making(lambda: mlp(nn.SyncBatchNorm(8))), devices_per_rank=2, precision="bfloat16", dtype="float32")
    ours.train(2)
    assert np.isfinite(ours.params).all()


def test_trying_lazy_modules_changes_neither_statistics_nor_modes() -> None:
    def make() -> Job:
        model = nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.BatchNorm1d(8), nn.LazyLinear(3))
        model[2].eval()
        return making(lambda: model)()

    ours = Local(make)
    assert not ours.state()["1.running_mean"].any()
    assert [each.training for each in ours.job.model] == [True, True, False, True]


@pytest.mark.parametrize("devices", [2, 3])
def test_replicas_are_one_device(devices: int) -> None:
    def make() -> Job:
        return making(lambda: mlp(nn.SyncBatchNorm(8)))()

    ours = Local(make, devices_per_rank=devices)
    single = Local(making(lambda: mlp(nn.BatchNorm1d(8))))
    ours.train(), single.train()
    for name, value in single.state().items():
        np.testing.assert_allclose(ours.state()[name], value, atol=1e-12, err_msg=name)


def test_bfloat16_computes_in_bfloat16_with_parameters_of_float32() -> None:
    kinds: list[torch.dtype] = []

    def make() -> Job:
        job = making(mlp)()
        job.model[0].register_forward_hook(lambda module, inputs, output: kinds.append(output.dtype))
        return job

    ours = Local(make, precision="bfloat16", dtype="float32")
    ours.train(20)
    assert kinds[-1] == torch.bfloat16 and ours.job.model[0].weight.dtype == torch.float32
    expected = Local(making(mlp), dtype="float32")
    expected.train(20)
    assert 0 < np.abs(ours.params - expected.params).max() < 1e-3


def test_a_module_in_bfloat16_trains_in_a_job() -> None:
    make = making(lambda: mlp(nn.BatchNorm1d(8)).bfloat16())
    ours = Local(make, dtype="float32")
    losses = ours.train(60)
    assert sum(losses[-5:]) < sum(losses[:5])
    values = ours.state()
    assert all(value.dtype == np.float32 for value in values.values())
    assert any(not np.array_equal(value, torch.from_numpy(value).bfloat16().float()) for value in values.values())
    ours.model.close()
    for name, value in ours.job.model.state_dict().items():
        if name in values:
            assert value.dtype == torch.bfloat16
            assert torch.equal(value, torch.from_numpy(values[name]).bfloat16())


@pytest.mark.parametrize(
    ("make", "part"),
    [
        pytest.param(lambda: making(lambda: nn.Sequential(nn.Linear(6, 3), nn.Linear(3, 3).bfloat16())), "1.weight"),
        pytest.param(lambda: making(lambda: nn.Linear(6, 3).bfloat16()), "float()"),
        pytest.param(lambda: making(lambda: nn.DataParallel(nn.Linear(6, 3))), "DataParallel"),
        pytest.param(lambda: making(lambda: nn.Linear(5, 3)), "(2, 6)"),
        pytest.param(lambda: making(mlp, nn.CrossEntropyLoss(reduction="sum")), "reduction"),
        pytest.param(lambda: making(mlp, nn.CrossEntropyLoss(reduction="none")), "reduction"),
        pytest.param(lambda: making(mlp, lambda outputs, labels: outputs), "(2, 3)"),
        pytest.param(lambda: making(mlp, 3), "loss"),
        pytest.param(lambda: making(mlp, nn.CrossEntropyLoss), "CrossEntropyLoss()"),
        pytest.param(lambda: making(mlp, train=DataLoader(Records(False))), "its dataset"),
        pytest.param(lambda: making(mlp, train=Stream()), "data.stream"),
        pytest.param(lambda: making(mlp, train=(X, Y)), "from_arrays"),
        pytest.param(lambda: making(mlp, train=[torch.ones(6)] * 4), "tuple"),
        pytest.param(lambda: making(mlp, train=[{"x": torch.ones(6)}] * 4), "labels"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_trained_is_refused_by_name(make: Callable[[], Callable[[], Job]], part: str) -> None:
    with pytest.raises(JobError) as error:
        Local(make())
    assert part in str(error.value)


def test_sparse_gradients_train_like_dense_ones() -> None:
    def trained(sparse: bool) -> np.ndarray:
        tokens = data.from_arrays(np.random.default_rng(3).integers(0, 5, (40, 2)), Y)
        embedding = making(
            lambda: nn.Sequential(nn.Embedding(5, 3, sparse=sparse), nn.Flatten(), nn.Linear(6, 3)), train=tokens
        )
        local = Local(embedding)
        local.train(5)
        return local.params.copy()

    np.testing.assert_array_equal(trained(True), trained(False))


def test_a_forward_pass_that_changes_parameters_is_refused() -> None:
    with pytest.raises(JobError, match="weight"):
        Local(making(lambda: Overwriting(6, 3))).step(0)


def test_seeds_differ_by_run() -> None:
    assert SEED == 0
    made = [Local(making(lambda: mlp(nn.Dropout(0.5))), seed=seed) for seed in (0, 1)]
    batch = made[0].loader.batch(0, 4)
    for each in made:
        each.params[:] = made[0].params
    assert float(made[0].accumulation.forward(batch, [4])) != float(made[1].accumulation.forward(batch, [4]))
