"""Files that version 0.1 wrote stay readable (tests/support/version_0_1)."""

from __future__ import annotations

import numpy as np
import pytest

from mpitrain import checkpoint
from mpitrain.checkpoint import Checkpoint
from mpitrain.core.layout import Layout
from mpitrain.monitor import heartbeat
from mpitrain.plan.job import load_job_file
from mpitrain.plan.options import job_options, read_config_file, run_options
from mpitrain.report.history import read_run
from mpitrain.report.time_shares import read_shares

from ..support.launch import JOBS, VERSION_0_1

RUN = VERSION_0_1 / "run"


def test_checkpoint_verifies_and_has_its_arrays() -> None:
    path = checkpoint.newest(RUN / "checkpoints")
    assert path is not None
    checkpoint.verify(path)
    with Checkpoint(path) as opened:
        assert opened.step == 20
        assert opened.attributes["/"]["position"] == 240
        assert opened.read("params/dense1.weight").shape == (64, 4)
        groups = {name.rpartition("/")[0] for name in opened.datasets}
        assert groups == {"params", "optimizer/mean", "optimizer/square", "averages"}


@pytest.mark.parametrize(
    ("name", "progress"),
    [
        ("sharded/step-0000000003.h5", (3, 36)),
        ("compressed/step-0000000003.h5", (3, 36)),  # sharded, too
        ("compressed/step-0000000004.h5", (4, 48)),
    ],
)
def test_checkpoints_are_read_whole(name: str, progress: tuple[int, int]) -> None:
    """HDF5 reads their structure, because their manifests do not describe it."""
    layout = Layout.pack(
        [("dense1.weight", (6, 4), "param"), ("dense1.bias", (4,), "param"), ("norm.mean", (4,), "state")]
    )
    vectors = {name: np.zeros(layout.size, np.float32) for name in ("params", "mean", "square")}
    path = VERSION_0_1 / name
    with Checkpoint(path) as opened:
        opened.verify_structure()
        assert opened.verify() == []
    restored = checkpoint.read(path, layout, vectors, 0)
    assert restored.progress == progress
    for offset, vector in zip((0, 100, 200), vectors.values(), strict=True):
        assert np.array_equal(layout.views(vector)["dense1.weight"].ravel(), np.arange(24) + offset)
    if path.parent.name == "compressed":
        assert restored.extra_state["mine"].values["scalar"] == 2.5


def test_run_directory_is_read() -> None:
    status = heartbeat.read(RUN)
    assert status is not None
    assert (status.state, status.step, status.heartbeat, status.host.hostname) == ("finished", 20, 2, "vm")
    run = read_run(RUN)
    assert (run.job, run.step, run.option("mode")) == ("small", 20, "sync")
    assert len(run.series("validation_loss")) == 2
    shares = read_shares(RUN)
    assert shares is not None
    assert [rank.rank for rank in shares.ranks] == [0, 1]


def test_config_gives_the_same_options() -> None:
    path = JOBS / "small.py"
    options = [*run_options(), *job_options(path, load_job_file(path))]
    values = read_config_file(RUN / "config.toml", options)
    assert (values["batch_size"], values["train_steps"], values["hidden_units"]) == (6, 20, 4)
