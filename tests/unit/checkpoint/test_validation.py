"""Checkpoints from untrusted sources do no harm. ``bench/malicious.py`` reads many more such files."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

from mpitrain import checkpoint
from mpitrain.checkpoint import reader
from mpitrain.checkpoint.container import Compression
from mpitrain.cli.main import main
from mpitrain.errors import DamagedCheckpoint

from ...support.damage import LAYOUT, save, state
from ...support.launch import ROOT, missing
from ...support.malicious import RECIPES, SECRET, seal
from ...support.malicious.sealing import manifest_of

FOREIGN = ("external storage", "external link", "soft link", "virtual secret", "virtual relative", "shard is a link")


@pytest.mark.full
def test_malicious_files_are_refused_or_harmless() -> None:
    """Files are read in processes with limited memory and time."""
    words = [sys.executable, str(ROOT / "bench" / "malicious.py"), "400"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["array at the root's path", "array at a group's path", "array below an array"])
def test_a_manifest_with_paths_that_no_file_has_is_refused(tmp_path: Path, name: str) -> None:
    path = save(tmp_path, 30)
    RECIPES[f"described {name}"](path, tmp_path / "secret")
    with pytest.raises(DamagedCheckpoint):
        checkpoint.Checkpoint(path)


@pytest.mark.full
def test_no_other_file_is_opened(tmp_path: Path) -> None:
    """Observe system calls, because Python does not see the files that libraries open."""
    if shutil.which("strace") is None:
        missing("strace")
    if subprocess.run(["strace", "-o/dev/null", "true"], check=False).returncode:
        pytest.skip("this system does not allow to trace")
    secret, trace = tmp_path / "secret", tmp_path / "trace"
    secret.write_bytes(SECRET)
    paths = [save(tmp_path / name, 30) for name in FOREIGN]
    for name, path in zip(FOREIGN, paths, strict=True):
        RECIPES[name](path, secret)
    words = ["strace", "-f", "-etrace=open,openat,openat2", f"-o{trace}", sys.executable, "-m", "mpitrain"]
    for command in (["verify", *paths], ["inspect", paths[0]], ["export", paths[0], "--to", "npz"]):
        done = subprocess.run([*words, *map(str, command)], cwd=tmp_path, capture_output=True, timeout=60, check=False)
        opened = {Path(file) for file in re.findall(r'open\w*\(.*?"(.*?)"(?!.* = -1)', trace.read_text())}
        assert done.returncode == 1 and paths[0] in opened
        assert secret not in opened and secret.name not in {file.name for file in opened}


def test_resuming_skips_a_named_pipe(tmp_path: Path) -> None:
    older = save(tmp_path, 20)
    RECIPES["named pipe"](save(tmp_path, 30), tmp_path)
    found, skipped = checkpoint.first_intact(checkpoint.steps(tmp_path).values(), checkpoint.verify)
    assert found is not None and found[0] == older and len(skipped) == 1


def test_a_symbolic_link_that_the_user_names_is_read(tmp_path: Path) -> None:
    link = tmp_path / "best.h5"
    link.symlink_to(save(tmp_path, 30))
    vectors = state(0)
    assert checkpoint.read(link, LAYOUT, vectors, 0).progress.step == 30
    assert np.array_equal(vectors["params"], state(30)["params"])


def test_values_that_are_not_finite_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    vectors = state(0)
    LAYOUT.views(vectors["params"])["dense.bias"][3] = np.inf
    LAYOUT.views(vectors["square"])["conv.weight"][0, 0, 0, 0] = np.nan
    for compression in ("none", "gzip"):
        path = tmp_path / f"{compression}.h5"
        checkpoint.write(path, LAYOUT, checkpoint.Snapshot(vectors, 5, 50), 0, {}, compression)  # type: ignore[arg-type]
        with checkpoint.Checkpoint(path) as opened:
            assert opened.verify() == ["optimizer/square/conv.weight", "params/dense.bias"]
        assert main(["verify", str(path)]) == 1
        assert "params/dense.bias" in capsys.readouterr().out


def test_terminal_commands_are_not_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, other = save(tmp_path, 30), save(tmp_path, 20)
    with h5py.File(path, "r+") as file:
        file.attrs["mode"] = "\x1b[2J"
    seal(path)
    assert main(["inspect", str(path)]) == 0
    assert main(["diff", str(path), str(other)]) == 1
    assert "\x1b" not in capsys.readouterr().out


def test_a_rest_of_values_without_digest_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path, 30)
    seal(path, {"arrays": {}})
    with pytest.raises(DamagedCheckpoint):
        checkpoint.verify(path)


def test_verify_compares_the_manifest_with_hdf5(tmp_path: Path) -> None:
    """This package uses the manifest's offsets, other programs use those of HDF5."""
    path = save(tmp_path, 30)
    manifest = manifest_of(path)
    arrays = {name: list(ranges[0]) for name, ranges in manifest.arrays.items()}
    names = ("params/dense.bias", "averages/dense.bias")
    arrays |= zip(names, [arrays[name] for name in reversed(names)], strict=True)
    seal(path, {"arrays": arrays, "structure": manifest.structure})
    with checkpoint.Checkpoint(path) as opened:
        assert np.array_equal(opened.read(names[0]), LAYOUT.views(state(30)["average"])["dense.bias"])
        with pytest.raises(DamagedCheckpoint, match="offsets"):
            opened.verify_structure()
    assert main(["verify", str(path)]) == 1


@pytest.mark.parametrize("compression", ["none", "gzip"])
def test_hdf5_does_not_open_checkpoints_in_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compression: Compression
) -> None:
    path, vectors = save(tmp_path, 30, compression), state(0)
    monkeypatch.delattr(h5py, "File")
    monkeypatch.setattr(reader, "structure_in_child", None)  # nor in a child process
    assert checkpoint.read(path, LAYOUT, vectors, 0).progress.step == 30
    assert np.array_equal(vectors["params"], state(30)["params"])
    checkpoint.load_matching(path, LAYOUT, vectors["params"])
    checkpoint.verify(path)


@pytest.mark.parametrize("compression", ["none", "gzip"])
def test_files_without_a_description_are_read(tmp_path: Path, compression: Compression) -> None:
    """Earlier versions wrote such files."""
    path = save(tmp_path, 30, compression)
    with checkpoint.Checkpoint(path) as described:
        seal(path)
        with checkpoint.Checkpoint(path) as opened:
            assert (opened.attributes, opened.datasets) == (described.attributes, described.datasets)
            assert opened.verify() == described.verify() == []
