"""PyTorch modules under a second MPI library."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from ..support.launch import Mpi
from . import support


def test_ranks_train_as_a_plain_loop_does(mpich_with_torch: Mpi, tmp_path: Path) -> None:
    flags = ("--kind", "cnn", "--dtype", "float64", "--optimizer", "momentum")
    stored = support.train(mpich_with_torch, 2, tmp_path, *flags)
    support.assert_close(stored, support.plain_loop("cnn", 8, 20, torch.float64, "momentum"), 1e-12)


def test_async_trains_with_a_server(mpich_with_torch: Mpi, tmp_path: Path) -> None:
    servers = ("--mode", "async", "--ps", "1", "--no-shared-memory")
    support.train(mpich_with_torch, 3, tmp_path, *servers, "--kind", "gpt", "--train-steps", "60", "--log-steps", "10")
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[-1] < losses[0]
    assert 'mpi = "MPICH' in (tmp_path / "config.toml").read_text()
