"""The guide "From DDP to mpitrain": its script, changed by its diff, trains like the original."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from ..support.launch import ROOT, Mpi, run, torchrun

PAGE = (ROOT / "docs" / "ddp.md").read_text(encoding="utf-8")
# Puts the examples of a step in the order of mpitrain, and gives each rank its share.
SAME_ORDER = """
import torch.distributed as dist
from mpitrain.data.permutation import order

class DistributedSampler:
    def __init__(self, dataset):
        self.count, self.rank, self.size = len(dataset), dist.get_rank(), dist.get_world_size()
    def set_epoch(self, epoch):
        self.epoch = epoch
    def __len__(self):
        return self.count // self.size
    def __iter__(self):
        examples = order(self.epoch * self.count, self.count, self.count, 0, None)
        return iter(examples.reshape(-1, self.size, 32)[:, self.rank].flatten().tolist())
"""


def block(language: str) -> str:
    """Return the first block of code in a language."""
    return re.search(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)[1]


def patched(text: str, diff: str) -> str:
    """Return a text to which a unified diff was applied."""
    for hunk in re.split(r"^@@.*@@\n", diff, flags=re.MULTILINE)[1:]:
        lines = [(line[:1] or " ", line[1:]) for line in hunk.splitlines()]
        before, after = ("\n".join(line for mark, line in lines if mark in kept) for kept in (" -", " +"))
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    return text


@pytest.fixture
def scripts(tmp_path: Path) -> tuple[Path, Path]:
    """The original script, with examples in the order of mpitrain, and the changed script."""
    original, changed = tmp_path / "original.py", tmp_path / "train.py"
    text = block("python")
    (tmp_path / "same_order.py").write_text(SAME_ORDER)
    original.write_text(text.replace("sampler = ", "from same_order import DistributedSampler\nsampler = ", 1))
    changed.write_text(patched(text, block("diff")))
    return original, changed


def saved_model(folder: Path) -> dict[str, torch.Tensor]:
    """Return the model that a script has saved, and remove its file."""
    model = torch.load(folder / "model.pt")
    (folder / "model.pt").unlink()
    return model


def assert_close(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=0, atol=1e-5)


def test_the_changed_script_trains_as_the_original(openmpi: Mpi, scripts: tuple[Path, Path], tmp_path: Path) -> None:
    original, changed = scripts
    torchrun(openmpi.python, original, cwd=tmp_path)
    expected = saved_model(tmp_path)
    command = [str(openmpi.python), "-m", "mpitrain", "run", "-n", "2", "--run-dir", str(tmp_path / "run")]
    for _ in range(2):  # the second run has no step left to train
        done = run([*command, str(changed)], timeout=120, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        assert_close(saved_model(tmp_path), expected)


def test_few_lines_change() -> None:
    added = re.findall(r"^\+(?!\+\+).+", block("diff"), flags=re.MULTILINE)
    assert len([line for line in added if "import" not in line]) <= 8
