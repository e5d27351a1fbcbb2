"""Modules trained in every mode: n ranks are a plain torch loop on the joined batch, and resuming is exact."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mpitrain import Job, checkpoint
from mpitrain.errors import CheckpointError

from ..support.launch import ROOT, Mpi
from . import models, support

KINDS = ("mlp", "cnn", "lstm", "gpt")
TIGHT = {torch.float32: 1e-5, torch.float64: 1e-12}


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("n", "dtype"), [(1, "float64"), (2, "float64"), (3, "float64"), (4, "float64"), (2, "float32")]
)
def test_ranks_train_as_a_plain_loop_does(openmpi: Mpi, kind: str, n: int, dtype: str, tmp_path: Path) -> None:
    # Adam divides by what may be rounding error alone.
    optimizer = "adam" if (kind, dtype) == ("mlp", "float64") else "momentum"
    stored = support.train(openmpi, n, tmp_path, "--kind", kind, "--dtype", dtype, "--optimizer", optimizer)
    found = getattr(torch, dtype)
    support.assert_close(stored, support.plain_loop(kind, 4 * n, 20, found, optimizer), TIGHT[found])


SERVED = ("--ps", "1", "--no-shared-memory")  # the server is reached by messages
MODES = {
    "local": ("--mode", "local", "--local-steps", "4"),
    "async": ("--mode", "async"),
    "async with servers": ("--mode", "async", *SERVED),
    "ssp": ("--mode", "ssp", "--staleness", "1"),
    "backup": ("--mode", "backup", "--backup-workers", "1", *SERVED),
}


@pytest.mark.parametrize(
    ("mode", "kind"),
    [("local", "cnn"), ("async", "gpt"), ("async with servers", "lstm"), ("ssp", "cnn"), ("backup", "mlp")],
)
def test_every_mode_trains_modules(openmpi: Mpi, mode: str, kind: str, tmp_path: Path) -> None:
    n = 2 if SERVED[0] not in MODES[mode] else 3
    support.train(
        openmpi,
        n,
        tmp_path,
        *MODES[mode],
        "--kind",
        kind,
        "--normalize",
        "own",
        "--train-steps",
        "60",
        "--log-steps",
        "10",
    )
    losses = [line["loss"] for line in metrics(tmp_path) if "loss" in line]
    assert losses[-1] < losses[0]
    assert any("validation_loss" in line for line in metrics(tmp_path))


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_resuming_is_never_having_stopped(openmpi: Mpi, mode: str, tmp_path: Path) -> None:
    n = 2 if mode == "sync" else 1
    flags = ("--mode", mode, "--kind", "cnn", "--dropout", "0.3", "--average", "--dataset", "tensors")
    flags += ("--normalize", "own")
    whole = support.train(openmpi, n, tmp_path / "whole", *flags)
    support.train(openmpi, n, tmp_path / "parts", *flags, "--train-steps", "9")
    support.assert_same_bits(support.train(openmpi, n, tmp_path / "parts", *flags), whole)
    assert "buffers/2.num_batches_tracked" in whole and "averages/1.weight" in whole


def test_resuming_on_other_ranks_continues_where_the_data_was(openmpi: Mpi, tmp_path: Path) -> None:
    support.train(openmpi, 2, tmp_path, "--kind", "gpt", "--train-steps", "9")
    support.train(openmpi, 3, tmp_path, "--kind", "gpt")
    with checkpoint.Checkpoint(checkpoint.find(tmp_path)[0]) as opened:
        assert opened.attributes["/"]["position"] == 4 * (9 * 2 + 11 * 3)


@pytest.mark.parametrize("flags", [(), ("--mode", "async"), ("--mode", "async", *SERVED)], ids=" ".join)
def test_parameters_frozen_by_a_hook_do_not_change(openmpi: Mpi, flags: tuple[str, ...], tmp_path: Path) -> None:
    stored = support.train(openmpi, 2, tmp_path, *flags, "--optimizer", "adamw", "--freeze")
    torch.manual_seed(support.SEED)
    initial = models.make("mlp").state_dict()
    assert (stored["params/0.weight"] == initial["0.weight"].numpy()).all()
    assert (stored["params/3.weight"] != initial["3.weight"].numpy()).all()


def test_an_error_in_one_backward_pass_ends_all_ranks(openmpi: Mpi, tmp_path: Path) -> None:
    done = openmpi.run(2, "-m", "mpitrain", "train", support.JOB, "--run-dir", tmp_path, "--fail-on", "1")
    assert done.returncode == 1
    assert "this gradient cannot be computed" in done.stderr and "rank 1" in done.stderr


@pytest.mark.parametrize("kind", ["cnn", "gpt"])
def test_an_export_is_a_state_dict(openmpi: Mpi, kind: str, tmp_path: Path) -> None:
    stored = support.train(openmpi, 1, tmp_path / "run", "--kind", kind)
    path = tmp_path / "exported.safetensors"
    done = openmpi.run(1, "-m", "mpitrain", "export", tmp_path / "run", "--to", "safetensors", "--output", path)
    assert done.returncode == 0, done.stderr
    model = models.make(kind)
    model.load_state_dict(load_file(path))  # strict: all names and shapes
    for name, value in model.state_dict().items():
        if f"params/{name}" in stored:
            assert (value.numpy() == stored[f"params/{name}"]).all()


@pytest.mark.parametrize("name", ["weights.pt", "wrapped.pth", "weights.safetensors"])
def test_training_starts_from_a_file_of_weights(name: str, tmp_path: Path) -> None:
    saved = models.make("gpt").state_dict()
    if name == "weights.safetensors":
        save_file({key: value.clone().bfloat16() for key, value in saved.items()}, tmp_path / name)
    elif name == "weights.pt":
        torch.save(saved, tmp_path / name)
    else:
        torch.save(
            {"epoch": 3, "state_dict": {f"module.{key}": value for key, value in saved.items()}}, tmp_path / name
        )
    run = support.Local(lambda: models.job("gpt"))
    fit = checkpoint.load_matching(tmp_path / name, run.plan.layout, run.params)
    assert not fit.wrong
    for key, value in run.state().items():
        expected = saved[key].bfloat16() if name == "weights.safetensors" else saved[key]
        assert (value == expected.double().numpy()).all()


@pytest.mark.parametrize("name", ["{}", "module.{}", "_orig_mod.module.{}", "module._orig_mod.{}"])
def test_names_of_wrapped_modules_match(name: str, tmp_path: Path) -> None:
    class Named(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = torch.nn.Sequential(models.make("mlp"))

        def forward(self, x: torch.Tensor) -> Any:
            return self.module(x)

    def make() -> Job:
        job = models.job("mlp")
        return Job(model=Named(), loss=job.loss, optimizer=job.optimizer, train=job.train)

    run = support.Local(make)
    saved = {name.format(key): value for key, value in Named().state_dict().items()}
    torch.save({key.replace("0.0", "0._orig_mod.0"): value for key, value in saved.items()}, tmp_path / "weights.pt")
    fit = checkpoint.load_matching(tmp_path / "weights.pt", run.plan.layout, run.params)
    assert not fit.wrong and len(fit.fitting) == len(saved)


def test_a_file_with_a_whole_module_is_refused(tmp_path: Path) -> None:
    torch.save(models.make("mlp"), tmp_path / "weights.pt")
    run = support.Local(models.job)
    with pytest.raises(CheckpointError, match="state_dict"):
        checkpoint.load_matching(tmp_path / "weights.pt", run.plan.layout, run.params)


def test_weights_that_would_run_code_are_refused(tmp_path: Path) -> None:
    class Code:
        def __reduce__(self) -> tuple[object, ...]:
            return Path.touch, (tmp_path / "was run",)

    torch.save({"0.weight": Code()}, tmp_path / "weights.pt")
    run = support.Local(models.job)
    with pytest.raises(CheckpointError):
        checkpoint.load_matching(tmp_path / "weights.pt", run.plan.layout, run.params)
    assert not (tmp_path / "was run").exists()


def test_other_jobs_do_not_import_torch(openmpi: Mpi, tmp_path: Path) -> None:
    code = "import sys, runpy; sys.argv = ['mpitrain', *sys.argv[1:]]\n"
    code += "try: runpy.run_module('mpitrain', run_name='__main__')\n"
    code += "except SystemExit: assert 'torch' not in sys.modules and 'mpitrain.training.loop' in sys.modules"
    done = openmpi.run(
        1, "-c", code, "train", ROOT / "jobs" / "mnist_mlp.py", "--train-steps", "3", "--run-dir", tmp_path
    )
    assert done.returncode == 0, done.stderr
