"""Buffers of modules: which ones are averaged, their changes, and those that each worker keeps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from mpitrain.core.extra_state import Versioned  # noqa: E402
from mpitrain.errors import CheckpointError  # noqa: E402
from mpitrain.pytorch.buffers import Buffers, owners_of  # noqa: E402


class Many(nn.Module):
    """Has buffers of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("mean", torch.tensor([1.0, 2.0], dtype=torch.float64))
        self.register_buffer("seen", torch.tensor(3))
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
        self.register_buffer("cache", torch.zeros(2), persistent=False)
        self.register_buffer("none", None)
        self.alias = self.norm


KEPT = {"buffers": {"seen", "mask", "norm.num_batches_tracked"}, "transient": set[str]()}


def bound(model: nn.Module) -> tuple[Buffers, dict[str, Any], dict[str, Any]]:
    """Return the buffers with their values and increments, which begin as NaN."""
    buffers = Buffers(model)
    values = {name: buffer.clone() for name, buffer in buffers.averaged.items()}
    increments = {name: torch.full_like(buffer, torch.nan) for name, buffer in values.items()}
    buffers.bind(values, increments)
    return buffers, values, increments


def test_finite_numbers_of_state_dict_are_averaged() -> None:
    assert set(Buffers(Many()).averaged) == {"mean", "norm.running_mean", "norm.running_var"}


def test_changes_are_weighted_by_the_share() -> None:
    model = Many()
    buffers, values, increments = bound(model)
    values["mean"] += 1  # as other workers have changed it
    buffers.load()
    assert model.mean.tolist() == [2, 3]
    model.mean += torch.tensor([4.0, 8.0])
    model.norm.running_var = model.norm.running_var * 3  # the forward pass may replace the tensor
    buffers.store_increments(0.25)
    assert increments["mean"].tolist() == [1, 2] and increments["norm.running_var"].tolist() == [0.5, 0.5]
    assert increments["norm.running_mean"].tolist() == [0, 0] and values["mean"].tolist() == [2, 3]
    buffers.load()
    assert model.mean.tolist() == [2, 3] and model.norm.running_var.tolist() == [1, 1]


def test_a_module_without_averaged_buffers() -> None:
    buffers, values, _ = bound(nn.Linear(1, 1))
    buffers.load()
    buffers.store_increments(1.0)
    assert not values and not buffers.extra_state()


def test_kept_buffers_are_copies_and_transient_ones_only_if_changed() -> None:
    model = Many()
    buffers = Buffers(model)
    state = buffers.extra_state()
    assert state.keys() == {"buffers"} and set(state["buffers"].values) == KEPT["buffers"]
    model.seen += 4
    assert state["buffers"].values["seen"] == 3
    model.cache += 1
    changed = buffers.extra_state()
    assert changed["transient"].values["cache"].tolist() == [1, 1]  # type: ignore[union-attr]
    model.cache = torch.zeros(2)
    assert set(buffers.extra_state()["transient"].values) == {"cache"}


def test_the_state_is_restored_also_if_the_size_has_changed() -> None:
    model, other = Many(), Many()
    buffers, others = Buffers(model), Buffers(other)
    model.seen, model.cache, model.mask[1] = torch.tensor(9), torch.arange(5.0), 2.0
    place = other.seen
    others.load_extra_state(buffers.extra_state())
    assert other.seen is place and place == 9 and other.mask.tolist() == [0, 2]
    assert other.cache.tolist() == [0, 1, 2, 3, 4] and other.mean.tolist() == [1, 2]
    others.load_extra_state({})
    assert other.seen == 9
    state = {"buffers": Versioned(1, {"seen": np.int64(5), "unknown": np.zeros(2)})}
    others.load_extra_state(state)  # type: ignore[arg-type]
    assert other.seen == 5 and other.seen.shape == ()
    with pytest.raises(CheckpointError, match="version 2"):
        others.load_extra_state({"buffers": Versioned(2, {})})


def test_the_owner_of_a_buffer_is_the_module_inside_a_compiled_one() -> None:
    inner = Many()
    wrapper = nn.Module()
    wrapper._orig_mod = nn.Sequential(inner)  # as torch.compile wraps a module
    ((owner, key), (norm, mean)) = owners_of(wrapper, ["0.seen", "0.norm.running_mean"])
    assert owner is inner._buffers and key == "seen" and norm is inner.norm._buffers and mean == "running_mean"
    assert set(Buffers(wrapper).averaged) == {"0.mean", "0.norm.running_mean", "0.norm.running_var"}
