"""Synchronous training over several hosts gives the results of synchronous training on one host."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import h5py
import numpy as np
import pytest

from mpitrain import checkpoint

from ..support.hosts.training import Hosts
from ..support.launch import JOBS, missing, one_line, run
from ..support.results import SMALL, assert_close, assert_same_bits, final
from ..support.world.controller import World


@pytest.mark.parametrize("flags", [(), ("--bucket-bytes", "0"), ("--no-shared-memory",)], ids=" ".join)
@pytest.mark.parametrize("ranks", [[1, 1, 1], [2, 2], [2, 1, 1]], ids=str)
def test_hosts_agree_with_one_rank(hosts: Hosts, alone, ranks: list[int], flags: tuple[str, ...], tmp_path: Path):
    batch = str(12 // sum(ranks))
    done = hosts.train(ranks, SMALL, "--dtype", "float64", "--batch-size", batch, "--run-dir", tmp_path, *flags)
    assert f"on {len(ranks)} nodes" in done.stdout
    assert_close(final(tmp_path), alone("--dtype", "float64"), 1e-12)


LOCAL = ("--mode", "local", "--local-steps", "10")


@pytest.mark.parametrize(
    "flags",
    [(), ("--bucket-bytes", "0"), ("--clip-norm", "0.2"), LOCAL, (*LOCAL, "--outer-optimizer", "nesterov")],
    ids=" ".join,
)
@pytest.mark.parametrize("ranks", [[1, 1, 1], [2, 2], [2, 1, 1]], ids=str)
def test_virtual_workers_give_the_same_bits_on_any_hosts(
    hosts: Hosts, world: World, ranks: list[int], flags: tuple[str, ...], tmp_path: Path
) -> None:
    words = ("--no-joint", "--virtual-workers", "7", "--batch-size", "3", "--validate-steps", "50", *flags)
    hosts.train(ranks, SMALL, *words, "--run-dir", tmp_path / "hosts")
    world.train(1, SMALL, *words, "--run-dir", tmp_path / "alone")
    assert_same_bits(final(tmp_path / "hosts"), final(tmp_path / "alone"))


@pytest.mark.parametrize("more", [(), ("--histogram-steps", "7"), ("--validate-steps", "7")], ids=" ".join)
def test_parameters_that_arrive_late_are_not_read_early(
    hosts: Hosts, alone, more: tuple[str, ...], tmp_path: Path
) -> None:
    """Without BatchNorm, and without hooks that read parameters, parameters arrive while the next step computes."""
    flags = ("--dtype", "float64", "--no-normalize")
    hosts.train([2, 2], SMALL, "--batch-size", "3", "--bucket-bytes", "0", "--run-dir", tmp_path, *flags, *more)
    assert_close(final(tmp_path), alone(*flags), 1e-12)


@pytest.mark.parametrize("what", [("--optimizer", "lamb"), ("--clip-norm", "0.5")], ids=" ".join)
def test_norms_are_of_all_hosts(hosts: Hosts, alone, what: tuple[str, ...], tmp_path: Path) -> None:
    flags = ("--dtype", "float64", *what)
    hosts.train([2, 1, 1], SMALL, "--batch-size", "3", "--run-dir", tmp_path, *flags)
    assert_close(final(tmp_path), alone(*flags), 1e-12)


WHOLE_TENSORS = """
import numpy as np
import torch

from mpitrain import Job, data


def job():
    torch.manual_seed(0)
    x = np.random.default_rng(0).standard_normal((60, 4))
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)).double()
    return Job(
        model=model,
        loss=torch.nn.CrossEntropyLoss(),
        optimizer=torch.optim.Adafactor(model.parameters(), 0.05),
        train=data.from_arrays(x, (x[:, 0] > 0).astype(np.int64)),
        train_steps=20,
    )
"""


def test_a_rank_without_a_partner_on_each_host_updates_no_whole_tensors(hosts: Hosts, openmpi, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    job, flags = tmp_path / "job.py", ("--dtype", "float64", "--run-dir")
    job.write_text(WHOLE_TENSORS)
    hosts.train([2, 1], job, "--batch-size", "4", *flags, tmp_path / "hosts")
    openmpi.train(1, job, "--batch-size", "12", *flags, tmp_path / "alone")
    assert_close(final(tmp_path / "hosts"), final(tmp_path / "alone"), 1e-12)


def test_a_run_twice_is_the_same_bits(hosts: Hosts, tmp_path: Path) -> None:
    for name in "ab":
        hosts.train([2, 1, 1], SMALL, "--bucket-bytes", "0", "--run-dir", tmp_path / name)
    assert_same_bits(final(tmp_path / "a"), final(tmp_path / "b"))


@pytest.mark.parametrize("mode", ["sync", "local"])
def test_every_node_writes_its_part_of_a_checkpoint(hosts: Hosts, mode: str, tmp_path: Path) -> None:
    """Readers see the content that one rank would have written, and a resumed run equals an uninterrupted run."""
    flags = ("--mode", mode, "--no-normalize", "--train-steps", "24")
    hosts.train([2, 1, 1], SMALL, *flags, "--run-dir", tmp_path / "whole")
    parts = ("--save-per-node", "--save-steps", "8", "--keep", "2", "--run-dir", tmp_path / "parts")
    hosts.train([2, 1, 1], SMALL, *flags, *parts)
    folder = tmp_path / "parts" / "checkpoints"
    assert [*checkpoint.steps(folder)] == [24, 16]
    assert [len(checkpoint.shard_paths(path)) for path in checkpoint.steps(folder).values()] == [3, 3]
    assert_same_bits(final(tmp_path / "parts"), final(tmp_path / "whole"))
    last = checkpoint.path_for(folder, 24)
    part = checkpoint.shard_paths(last)[1]
    part.write_bytes(part.read_bytes()[:-1])
    done = hosts.train([2, 1, 1], SMALL, *flags, *parts)
    assert part.name in done.stdout
    assert "resumed from" in done.stdout
    checkpoint.verify(last)
    if mode == "sync":  # in local each worker has its own slots, and a checkpoint has their mean
        assert_same_bits(final(tmp_path / "parts"), final(tmp_path / "whole"))


def test_nodes_write_one_file(hosts: Hosts, tmp_path: Path) -> None:
    """Ranks, and other programs that know HDF5, read it as a regular checkpoint."""
    flags = ("--no-normalize", "--train-steps", "24")
    hosts.train([2, 1, 1], SMALL, *flags, "--run-dir", tmp_path / "whole")
    run_dir = tmp_path / "together"
    parts = ("--no-normalize", "--save-per-node", "--save-steps", "8", "--keep", "1", "--run-dir", run_dir)
    for steps in ("8", "16"):
        hosts.train([2, 1, 1], SMALL, *parts, "--train-steps", steps, "--save-one-file")
    only = checkpoint.path_for(run_dir / "checkpoints", 16)
    assert [*only.parent.iterdir()] == [only]
    checkpoint.verify(only)
    with checkpoint.Checkpoint(only) as opened, h5py.File(only) as file:
        for name in opened.datasets:
            assert np.array_equal(file[name][()], opened.read(name))
    if shutil.which("h5dump") is None:
        missing("h5dump, of Debian's package hdf5-tools")
    assert run(["h5dump", "-o", os.devnull, str(only)]).returncode == 0
    done = hosts.train([2, 1, 1], SMALL, *parts, "--train-steps", "24")
    assert f"resumed from {only} at step 16" in done.stdout
    assert len(checkpoint.shard_paths(checkpoint.path_for(only.parent, 24))) == 3
    assert_same_bits(final(run_dir), final(tmp_path / "whole"))


def test_what_is_being_saved_is_saved_where_the_loss_ends_the_run(hosts: Hosts, tmp_path: Path) -> None:
    done = hosts.start([1, 1], JOBS / "diverging.py", "--save-per-node", "--save-steps", "1", "--run-dir", tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "the loss is nan at step 8" in one_line(done.stderr)
    path = checkpoint.newest(tmp_path / "checkpoints")
    assert path == checkpoint.path_for(tmp_path / "checkpoints", 7)
    checkpoint.verify(path)


def test_doctor_compares_hosts(hosts: Hosts, tmp_path: Path) -> None:
    words = [str(hosts.network.python), "-m", "mpitrain", "doctor", "--json", "--run-dir", str(tmp_path)]
    done = run(hosts.network.launch([2, 1, 1], words), env=hosts.network.environment)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {finding["check"]: finding for finding in json.loads(done.stdout)}
    for check in ("host h1", "host h2", "host h3", "within a host", "to h2", "to h3", "windows to h3", "clocks"):
        assert found[check]["verdict"] in ("pass", "warning"), found[check]
    assert found["visible on all hosts"]["verdict"] == "pass"
