"""Modules trained in every mode: in mode sync, n ranks give the result of a plain torch loop with the global batch;
resuming is exact."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mpitrain import Job, checkpoint
from mpitrain.cli.main import main
from mpitrain.errors import CheckpointError

from ..support.launch import ROOT, Mpi
from ..support.world.controller import World
from . import models, support

TIGHT = {torch.float32: 1e-5, torch.float64: 1e-12}


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.quick
@pytest.mark.parametrize(
    ("kind", "n", "dtype", "optimizer"),
    [
        *(("all", n, "float64", "momentum") for n in (1, 3)),
        ("all", 2, "float32", "momentum"),
        ("gpt", 2, "float64", "momentum"),  # examples of integers
        ("mlp", 2, "float64", "adam"),  # with other kinds Adam may divide by pure rounding errors
    ],
)
def test_ranks_train_as_a_plain_loop_does(
    world: World, kind: str, n: int, dtype: str, optimizer: str, tmp_path: Path
) -> None:
    stored = support.train(world, n, tmp_path, "--kind", kind, "--dtype", dtype, "--optimizer", optimizer)
    found = getattr(torch, dtype)
    support.assert_close(stored, support.plain_loop(kind, 4 * n, 20, found, optimizer), TIGHT[found])


SERVER_FLAGS = ("--ps", "1", "--no-shared-memory")  # the server is reached by messages
LOCAL = ("--mode", "local", "--local-steps")
DILOCO = (*LOCAL, "9", "--outer-optimizer", "nesterov", "--fragments", "2", "--overlap-steps", "3")
MODES = {
    "local": (*LOCAL, "4"),
    "diloco": DILOCO,
    "post-local": (*LOCAL, "4", "--local-after", "20"),
    "async with servers": ("--mode", "async", *SERVER_FLAGS),
    "ssp": ("--mode", "ssp", "--staleness", "1"),
    "backup": ("--mode", "backup", "--backup-workers", "1", *SERVER_FLAGS),
}


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_trains_modules_except_frozen_parameters(world: World, mode: str, tmp_path: Path) -> None:
    n = 3 if SERVER_FLAGS[0] in MODES[mode] else 2
    flags = ("--kind", "all", "--normalize", "own", "--optimizer", "adamw", "--freeze")
    stored = support.train(world, n, tmp_path, *MODES[mode], *flags, "--train-steps", "60")
    torch.manual_seed(support.SEED)
    model = models.make("all", "own").eval()
    initial = model.state_dict()
    # Measured on all examples: the loss of one batch is noise. With servers it also depends on the workers' speeds.
    x, y = map(torch.from_numpy, models.arrays("all"))
    losses = [line["validation_loss"] for line in metrics(tmp_path) if "validation_loss" in line]
    assert losses[-1] < models.all_losses(model(x.float()), y).item()
    assert (stored["params/mlp.0.weight"] == initial["mlp.0.weight"].numpy()).all()
    assert (stored["params/mlp.3.weight"] != initial["mlp.3.weight"].numpy()).all()


@pytest.mark.parametrize(("n", "mode"), [(2, ()), (1, ("--mode", "async")), (2, DILOCO)], ids=str)
def test_resuming_is_never_having_stopped(world: World, n: int, mode: tuple[str, ...], tmp_path: Path) -> None:
    flags = (*mode, "--kind", "cnn", "--dropout", "0.3", "--average", "--dataset", "tensors")
    flags += ("--normalize", "own")
    whole = support.train(world, n, tmp_path / "whole", *flags, "--save-steps", "9")
    early = checkpoint.path_for(tmp_path / "whole" / "checkpoints", 9)
    support.assert_same_bits(support.train(world, n, tmp_path / "parts", *flags, "--resume", early), whole)
    assert "buffers/2.num_batches_tracked" in whole and "averages/1.weight" in whole


def test_validation_does_not_change_training(world: World, tmp_path: Path) -> None:
    """Validation binds the vectors again, after which the gradient that the module has shown is not a script's own."""
    flags = ("--kind", "mlp", "--validate-steps")
    often = support.train(world, 2, tmp_path / "often", *flags, "3")
    support.assert_same_bits(support.train(world, 2, tmp_path / "once", *flags, "0"), often)


def test_resuming_on_other_ranks_continues_where_the_data_was(world: World, tmp_path: Path) -> None:
    support.train(world, 1, tmp_path, "--kind", "gpt", "--train-steps", "9")
    support.train(world, 2, tmp_path, "--kind", "gpt")
    with checkpoint.Checkpoint(checkpoint.find(tmp_path)[0]) as opened:
        assert opened.attributes["/"]["position"] == 4 * (9 * 1 + 11 * 2)


def test_an_error_in_one_backward_pass_ends_all_ranks(openmpi: Mpi, tmp_path: Path) -> None:
    done = openmpi.run(2, "-m", "mpitrain", "train", support.JOB, "--run-dir", tmp_path, "--fail-on", "1")
    assert done.returncode == 1
    assert "this gradient cannot be computed" in done.stderr and "rank 1" in done.stderr


def test_an_export_is_a_state_dict(world: World, tmp_path: Path) -> None:
    stored = support.train(world, 1, tmp_path / "run", "--kind", "all")
    path = tmp_path / "exported.safetensors"
    assert main(["export", str(tmp_path / "run"), "--to", "safetensors", "--output", str(path)]) == 0
    model = models.make("all")
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


@pytest.mark.parametrize(
    "name", ["{}", "module.{}", "_orig_mod.module.{}", "module._orig_mod.{}", "model.{}", "model.module._orig_mod.{}"]
)
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


@pytest.mark.parametrize("key", ["state_dict", "model_state_dict", "net", "params"])
@pytest.mark.parametrize("suffix", [".ckpt", ".pth.tar", ".pkl", ""])
def test_where_training_scripts_keep_the_parameters(key: str, suffix: str, tmp_path: Path) -> None:
    model = models.make("mlp")
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 12)).sum().backward()
    optimizer.step()
    saved = {f"model.{name}": value for name, value in model.state_dict().items()}
    path = tmp_path / f"weights{suffix}"
    torch.save({"epoch": 3, key: saved, "optimizer": optimizer.state_dict(), "best": torch.tensor(0.5)}, path)
    run = support.Local(lambda: models.job("mlp"))
    assert not checkpoint.load_matching(path, run.plan.layout, run.params).wrong


def test_parameters_that_are_not_clear(tmp_path: Path) -> None:
    state, path = models.make("mlp").state_dict(), tmp_path / "weights.pt"
    run = support.Local(lambda: models.job("mlp"))
    first = next(iter(state))
    for content, named in (
        ({"net": state, "ema": state}, ["net", "ema"]),
        ({**{f"model.{name}": value for name, value in state.items()}, **state}, [f"model.{first}", first]),
        ({f"backbone.{name}": value for name, value in state.items()}, [f"backbone.{first}", first]),
        ({**state, first: state[first].to_sparse()}, [first]),
        ({**state, first: state[first].to("meta")}, [first]),
    ):
        torch.save(content, path)
        with pytest.raises(CheckpointError) as error:
            checkpoint.load_matching(path, run.plan.layout, run.params)
        assert all(name in str(error.value) for name in named)


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
