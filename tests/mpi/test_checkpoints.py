"""Checkpoints of whole runs: the times of saves, failed saves, and resuming on other numbers of ranks."""

from __future__ import annotations

import json
import mmap
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import h5py
import numpy as np
import pytest

from mpitrain import checkpoint
from mpitrain.checkpoint.container import write_container
from mpitrain.checkpoint.manifest import HEAD, Manifest, block_bytes
from mpitrain.errors import DamagedCheckpoint
from mpitrain.process.signals import STOPPED_EARLY

from ..support.kills import end_all
from ..support.launch import JOBS, LAUNCHER_ENVIRONMENT, PROGRAMS, VERSION_0_1, Mpi, missing, one_line
from ..support.results import assert_close, assert_same_bits, final
from ..support.saved_state import LAYOUT, extra_state, state
from ..support.waiting import limit, wait_until
from ..support.world.controller import World

SMALL, RESHARDING = JOBS / "small.py", JOBS / "resharding.py"
FOREVER = ["--train-steps", "100000000", "--validate-steps", "0", "--log-steps", "0"]
ENVIRONMENT = {**os.environ, **LAUNCHER_ENVIRONMENT}


def steps(run_dir: Path) -> list[int]:
    """Return the steps of a run's checkpoints, the highest first, after verifying all of them."""
    found = checkpoint.steps(run_dir / "checkpoints")
    for path in found.values():
        checkpoint.verify(path)
    return [*found]


def wait_for_checkpoint(process: subprocess.Popen[str], run_dir: Path) -> None:
    wait_until(lambda: checkpoint.steps(run_dir / "checkpoints"), "a checkpoint", process=process)


@pytest.mark.parametrize(
    ("mode", "flags"),
    [
        (["sync"], ["--save-background"]),
        (["sync"], ["--no-save-background"]),
        (["sync"], ["--save-compression", "gzip"]),
        (["local"], ["--save-background"]),
        (["async"], ["--no-save-background"]),
        (["async", "--ps", "1"], ["--save-background"]),
        (["async", "--ps", "1"], ["--save-compression", "gzip"]),
    ],
    ids=" ".join,
)
def test_every_so_many_steps_and_the_newest_are_kept(
    world: World, mode: list[str], flags: list[str], tmp_path: Path
) -> None:
    words = ["--no-normalize", "--train-steps", "48", "--save-steps", "8", "--keep", "2", "--keep-every", "16"]
    world.train(3, SMALL, "--mode", *mode, *words, *flags, "--run-dir", tmp_path)
    assert steps(tmp_path) == [48, 40, 32, 16]


@pytest.mark.parametrize("mode", [["sync"], ["backup"], ["async", "--ps", "1"]], ids=" ".join)
def test_every_so_many_seconds(openmpi: Mpi, world: World, mode: list[str], tmp_path: Path) -> None:
    """A run also saves before its time limit ends it."""
    # Compile the kernels of the mode first: the compilation can take longer than the limit.
    world.train(3, SMALL, "--mode", *mode, "--no-normalize", "--train-steps", "2", "--run-dir", tmp_path / "short")
    words = [*FOREVER, "--no-normalize", "--save-secs", "1", "--time-limit", "12"]
    run_dir = tmp_path / "run"
    done = openmpi.run(3, "-m", "mpitrain", "train", SMALL, "--mode", *mode, *words, "--run-dir", run_dir)
    assert done.returncode == STOPPED_EARLY, done.stdout + done.stderr
    assert re.search(r" after step [\d,]+ .*time limit", done.stdout)
    assert len(steps(run_dir)) >= 2


@pytest.mark.quick
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_has_the_run_save_and_end(openmpi: Mpi, n: int, number: signal.Signals, tmp_path: Path) -> None:
    """The signal is sent to the ranks only; a launcher that receives a signal may end the ranks before they save."""
    words = [*openmpi.command(n), str(openmpi.python), "-m", "mpitrain", "train", str(SMALL), *FOREVER]
    words += ["--save-steps", "10", "--keep", "1", "--run-dir", str(tmp_path)]
    with subprocess.Popen(words, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            wait_for_checkpoint(process, tmp_path)
            for pid in ranks_of(tmp_path, process.pid):
                os.kill(pid, number)
            out, _ = process.communicate(timeout=limit(60))
        finally:
            end_all(process, tmp_path)  # type: ignore[arg-type]
    assert process.returncode == STOPPED_EARLY
    assert re.search(rf" after step [\d,]+.*: {number.name}$", out, re.MULTILINE)
    last = max(steps(tmp_path))
    assert f" at step {last:,}" in out or f"{last:,} steps in" in out


def ranks_of(run_dir: Path, launcher: int) -> list[int]:
    """Return the process ids of the ranks, without their launcher."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        words = path.read_text().split("\0") if path.exists() else []
        if str(run_dir) in words and "mpirun" not in words[0] and int(path.parent.name) != launcher:
            found.append(int(path.parent.name))
    return found


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_mpitrain_run_has_its_ranks_save(mpi: Mpi, number: signal.Signals, tmp_path: Path) -> None:
    words = [str(mpi.python), "-m", "mpitrain", "run", "-n", "2", str(SMALL), *FOREVER]
    words += ["--save-steps", "1000000", "--save-secs", "0.5", "--keep", "1", "--run-dir", str(tmp_path)]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            wait_for_checkpoint(process, tmp_path)
            process.send_signal(number)
            out, err = process.communicate(timeout=limit(60))
        finally:
            end_all(process, tmp_path)  # type: ignore[arg-type]
    assert process.returncode == STOPPED_EARLY, out + err
    assert re.search(r" after step [\d,]+ .*: requested$", out, re.MULTILINE)
    assert f"--run-dir {tmp_path}" in out.splitlines()[-1]
    line, last = err.split("\n")
    assert last == "" and "Ctrl-C" in line
    assert len(steps(tmp_path)) == 1


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A run directory whose checkpoint folder is a file system of 600 kB."""
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    mounted = (
        os.geteuid() == 0
        and not subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", folder], stderr=subprocess.DEVNULL, check=False
        ).returncode
    )
    if not mounted:
        missing("the right to mount a tmpfs")
    yield folder.parent
    subprocess.run(["umount", folder], check=True)


@pytest.mark.parametrize("background", ["--save-background", "--no-save-background"])
def test_a_full_disk_does_not_end_the_run(
    openmpi: Mpi, world: World, background: str, small_disk: Path, tmp_path: Path
) -> None:
    flags = ["--hidden-units", "48", "--train-steps", "120", "--save-steps", "10"]
    done = openmpi.run(2, "-m", "mpitrain", "train", SMALL, *flags, background, "--run-dir", small_disk)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "No space left on device" in one_line(done.stderr)
    assert "No space left on device; " in done.stderr
    saved = steps(small_disk)
    assert 0 < len(saved) < 12
    assert saved[0] == 10 * len(saved)  # the checkpoints before the disk was full
    assert '"step":120' in (small_disk / "metrics.jsonl").read_text().replace(" ", "")
    world.train(2, SMALL, *flags, "--save-steps", "0", "--run-dir", tmp_path / "whole")
    world.train(2, SMALL, *flags, "--resume", newest(small_disk), "--save-steps", "0", "--run-dir", tmp_path / "rest")
    assert_same_bits(final(tmp_path / "rest"), final(tmp_path / "whole"))


def newest(run_dir: Path) -> Path:
    found = checkpoint.newest(run_dir / "checkpoints")
    assert found is not None
    return found


@pytest.mark.quick
def test_a_damaged_checkpoint_is_skipped(openmpi: Mpi, tmp_path: Path) -> None:
    flags = ["--train-steps", "30", "--save-steps", "10", "--run-dir", tmp_path]
    openmpi.train(2, SMALL, *flags)
    whole = final(tmp_path)
    spoil(newest(tmp_path))
    done = openmpi.train(2, SMALL, *flags)
    assert str(checkpoint.path_for(tmp_path / "checkpoints", 30)) in done.stdout
    assert "at step 20" in done.stdout
    assert_same_bits(final(tmp_path), whole)
    for path in checkpoint.steps(tmp_path / "checkpoints").values():
        spoil(path)
    refused = openmpi.run(2, "-m", "mpitrain", "train", SMALL, *flags)
    assert refused.returncode == 2
    assert f" 3 checkpoints in {tmp_path / 'checkpoints'} " in one_line(refused.stderr)


@pytest.mark.parametrize("rank", [0, 1])
def test_damage_that_one_rank_finds_while_it_reads_has_all_go_back(
    each_world: World, rank: int, tmp_path: Path
) -> None:
    done = each_world.run(3, PROGRAMS / "falling_back.py", tmp_path, str(rank))
    reached, resumed, skipped = done.stdout.splitlines()
    assert (reached, resumed) == ("2 20 2.5", str(checkpoint.path_for(tmp_path, 2)))
    assert skipped.startswith(f"{checkpoint.path_for(tmp_path, 3)} ") and f"(rank {rank} of 3" in skipped


@pytest.mark.parametrize("mode", [["local"], ["async", "--ps", "1"]], ids=" ".join)
def test_every_mode_goes_back(world: World, mode: list[str], tmp_path: Path) -> None:
    flags = ["--mode", *mode, "--no-normalize", "--train-steps", "30", "--save-steps", "10", "--run-dir", tmp_path]
    world.train(3, SMALL, *flags)
    damaged = newest(tmp_path)
    spoil(damaged)
    done = world.train(3, SMALL, *flags)
    assert str(damaged) in done.stdout
    assert re.search(r"resumed from .* at step 2[04]$", done.stdout, re.MULTILINE)  # local saves after an averaging
    assert steps(tmp_path)[0] == 30


def spoil(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("mode", [["sync"], ["async", "--ps", "1"]], ids=" ".join)
def test_a_run_with_nothing_left_to_train(world: World, mode: list[str], tmp_path: Path) -> None:
    """The run saves again only in another directory, not in its own. All workers must agree on this."""
    flags = ["--mode", *mode, "--no-normalize", "--train-steps", "4"]
    world.train(3, SMALL, *flags, "--run-dir", tmp_path / "a")
    before = newest(tmp_path / "a").stat().st_mtime_ns
    assert "at step 4 of 4\n" in world.train(3, SMALL, *flags, "--run-dir", tmp_path / "a").stdout
    assert newest(tmp_path / "a").stat().st_mtime_ns == before
    world.train(3, SMALL, *flags, "--resume", newest(tmp_path / "a"), "--run-dir", tmp_path / "b")
    assert_same_bits(final(tmp_path / "b"), final(tmp_path / "a"))


def test_init_from_takes_what_fits(world: World, tmp_path: Path) -> None:
    world.train(1, SMALL, "--train-steps", "20", "--no-normalize", "--run-dir", tmp_path / "a")
    path = newest(tmp_path / "a")
    done = world.train(2, SMALL, "--train-steps", "0", "--init-from", path, "--run-dir", tmp_path / "b")
    (note,) = (line for line in done.stdout.splitlines() if str(path) in line)
    assert " dense1.bias " in note and " batchnorm1.scale " in note
    before, after = final(tmp_path / "a"), final(tmp_path / "b")
    for name in ("params/dense1.weight", "params/dense2.bias"):
        assert after[name].tobytes() == before[name].tobytes()
        assert after[name.replace("params", "averages")].tobytes() == before[name].tobytes()
    assert not after["optimizer/mean/dense1.weight"].any()
    words = ["--batch-size", "5", "--seen-dir", tmp_path, "--init-from", path]
    assert f"--init-from {path}: " in world.refusal(1, RESHARDING, *words)


@pytest.fixture(scope="module")
def four_workers(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of two equal runs of 4 workers with 3 examples each: ``run`` of 2 steps, ``whole`` of a whole epoch."""
    folder = tmp_path_factory.mktemp("four")
    for name, last in (("run", "2"), ("whole", "5")):
        resharding(world, 4, folder / name, "3", last)
    return folder


def resharding(world: World, n: int, run_dir: Path, batch: str, last: str, *flags: str | Path) -> None:
    words = ["--dtype", "float64", "--batch-size", batch, "--train-steps", last, "--run-dir", run_dir]
    world.train(n, RESHARDING, *words, "--seen-dir", run_dir.with_suffix(".seen"), *flags)


def seen(run_dir: Path) -> list[int]:
    return [number for path in run_dir.with_suffix(".seen").iterdir() for number in json.loads(path.read_text())]


OTHERS = [
    (1, "12", []),
    (2, "6", []),
    (4, "12", ["--mode", "async", "--ps", "2"]),
    (3, "6", ["--mode", "backup", "--ps", "1", "--backup-workers", "0"]),
]


@pytest.mark.parametrize(("n", "batch", "flags"), OTHERS, ids=str)
def test_going_on_with_other_ranks(
    world: World, n: int, batch: str, flags: list[str], four_workers: Path, tmp_path: Path
) -> None:
    begun = newest(four_workers / "run")
    # No step is left to train: the new ranks write the state that they have read.
    resharding(world, n, tmp_path / "copy", batch, "2", "--resume", begun, *flags)
    assert_same_bits(final(tmp_path / "copy"), final(four_workers / "run"))
    resharding(world, n, tmp_path / "rest", batch, "5", "--resume", begun, *flags)
    assert sorted(seen(four_workers / "run") + seen(tmp_path / "rest")) == list(range(60))
    whole, rest = final(four_workers / "whole"), final(tmp_path / "rest")
    if "async" not in flags:  # async computes gradients with older parameters
        assert_close(rest, whole, 1e-12)
    first, last = losses(four_workers / "run")[-1], losses(tmp_path / "rest")[-1]
    assert last < first
    assert np.isclose(last, losses(four_workers / "whole")[-1], rtol=0.1)


def losses(run_dir: Path) -> list[float]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line["validation_loss"] for line in lines if "validation_loss" in line]


@pytest.mark.parametrize("how", ["background", "waiting"])
def test_a_part_that_cannot_be_written_leaves_no_checkpoint(each_world: World, how: str, tmp_path: Path) -> None:
    done = each_world.run(3, PROGRAMS / "failing_part.py", tmp_path, how)
    message, steps = done.stdout.splitlines()
    assert " step 2 " in message and "Disk quota exceeded (node1); " in message
    assert steps == "[3, 1]"


REFUSALS = {
    "limit": "File too large (node1)",
    "files": "Too many open files (node1)",
    "full": "No space left on device",
}


@pytest.mark.parametrize(
    ("how", "refusal"), [("background", "limit"), ("waiting", "limit"), ("background", "files"), ("background", "full")]
)
def test_a_file_that_nodes_write_together(each_world: World, how: str, refusal: str, small_disk: Path) -> None:
    """The file is read like a file of a single node. If a node fails, no file is left and training continues."""
    folder = small_disk / "checkpoints"
    done = each_world.run(3, PROGRAMS / "together.py", folder, how, refusal)
    message, names = done.stdout.splitlines()
    assert " step 2 " in message and REFUSALS[refusal] in message
    assert names == "['step-0000000001.h5', 'step-0000000003.h5']"
    for step, path in checkpoint.steps(folder).items():
        checkpoint.verify(path)
        found = {name: np.zeros_like(vector) for name, vector in state(step).items()}
        assert checkpoint.read(path, LAYOUT, found, 0) == ((step, 2 * step), extra_state(step))
        with h5py.File(path) as file:
            for name, group in (("params", "params"), ("momentum", "optimizer/momentum")):
                for entry, view in LAYOUT.views(state(step)[name]).items():
                    assert LAYOUT.views(found[name])[entry].tobytes() == view.tobytes()
                    assert np.array_equal(file[f"{group}/{entry}"][()], view)
    content = path.read_bytes()
    ranges = Manifest.unpack(content[: block_bytes(content[:HEAD])]).arrays.values()
    begins = [part.start for parts in ranges for part in parts[1:]]  # of the second and the third node
    assert len(begins) == 2 and not any(begin % mmap.PAGESIZE for begin in begins)
    for at in range(0, len(content), len(content) // 60):
        damaged = bytearray(content)
        damaged[at] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(DamagedCheckpoint):
            checkpoint.verify(path)


@pytest.mark.quick
def test_a_run_of_version_0_1_resumes(world: World, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(VERSION_0_1 / "run", run_dir)
    flags = ("--config", VERSION_0_1 / "run" / "config.toml", "--run-dir", run_dir, "--train-steps", "22")
    world.train(2, JOBS / "small.py", *flags)
    assert [*checkpoint.steps(run_dir / "checkpoints")] == [22, 20]


@pytest.mark.parametrize("flags", [(), ("--mode", "async", "--ps", "1")], ids=str)
def test_state_of_a_later_version_is_refused_in_one_line(
    openmpi: Mpi, world: World, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    """This also holds if servers, which have no such state, wait for the workers."""
    arguments = (SMALL, "--train-steps", "4", "--no-normalize", *flags)
    world.train(3, *arguments, "--run-dir", tmp_path / "a")
    path = checkpoint.path_for(tmp_path / "a" / "checkpoints", 4)
    with checkpoint.Checkpoint(path) as opened:
        arrays = {name: opened.read(name) for name in opened.datasets}
        attributes = {name: dict(values) for name, values in opened.attributes.items()}
    attributes["run/state/mine"] = {"version": 2, "x": 1.0}  # of a strategy or version that this run lacks
    write_container(path, arrays, attributes)
    resumed = world.train(3, *arguments, "--resume", path, "--run-dir", tmp_path / "c")
    assert "'mine'" in resumed.stdout + resumed.stderr
    attributes["run/state/hooks"] = {"version": 2, "states": "[]"}
    write_container(path, arrays, attributes)
    done = openmpi.run(3, "-m", "mpitrain", "train", *arguments, "--resume", path, "--run-dir", tmp_path / "b")
    assert done.returncode == 2 and "version 2 of the state hooks" in done.stderr, done.stdout + done.stderr
