"""Every mode trains every kind of module: one run per mode trains all kinds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ..support.world.controller import World
from . import support
from .four_kinds import JOB, KINDS, FourKinds, examples, losses

SERVER_FLAGS = ("--ps", "1", "--no-shared-memory")  # the server is reached by messages
MODES = {
    "sync": (2, ()),
    "local": (2, ("--local-steps", "4")),
    "async": (2, ()),
    "ssp": (3, ("--staleness", "1", *SERVER_FLAGS)),
    "backup": (3, ("--backup-workers", "1", *SERVER_FLAGS)),
}


@pytest.mark.quick
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_trains_every_kind(world: World, mode: str, tmp_path: Path) -> None:
    n, flags = MODES[mode]
    stored = support.train(world, n, tmp_path, "--mode", mode, *flags, job=JOB)
    trained = {
        name.removeprefix("params/"): torch.from_numpy(value)
        for name, value in stored.items()
        if name.startswith("params/")
    }
    torch.manual_seed(support.SEED)
    model = FourKinds().eval()
    initial = {name: value.clone() for name, value in model.state_dict().items()}
    inputs, labels = examples()
    with torch.no_grad():
        before = losses(model(**inputs), labels)
        model.load_state_dict(trained, strict=False)  # without counters
        after = losses(model(**inputs), labels)
    assert [kind for kind in KINDS if not after[kind] < before[kind]] == []
    assert {"cnn.2.running_mean", "cnn.2.running_var"} <= trained.keys()
    for name, value in trained.items():
        assert value.isfinite().all() and not torch.equal(value, initial[name]), name
