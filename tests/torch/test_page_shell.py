"""Commands for one host on the documentation pages are run, with fewer ranks and steps."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from mpitrain import data

from ..support.launch import Mpi, run
from ..support.page_shell import PAGES, commands, make_folder, place, shortened

# Replacements for texts that are valid only at the reader's site.
SITE = {"-n 64": "-n 2", "/scratch/me/runs": "runs", " RUN ": " runs/wide "}


def make_missing_files(command: str, folder: Path) -> Iterator[list[str]]:
    """Yield commands that train the runs which a command reads, unless they exist; write the command's other inputs."""
    for name in re.findall(r"(?<!--run-dir )runs/(\w+)", command):
        if not (folder / "runs" / name).exists():
            yield ["mpitrain", "run", "-n", "2", "job.py", "--train-steps", "20", "--run-dir", f"runs/{name}"]
    if "other.h5" in command:
        shutil.copy(max((folder / "runs" / "wide" / "checkpoints").glob("*.h5")), folder / "other.h5")
    if "examples.npy" in command:
        np.save(folder / "examples.npy", data.mnist().validation.read_batch(0, 4).examples)
    if "weights.pt" in command:
        layers = torch.nn.Linear(64, 100), torch.nn.ReLU(), torch.nn.Linear(100, 10)
        torch.save(torch.nn.Sequential(*layers).state_dict(), folder / "weights.pt")


@pytest.mark.parametrize(
    "page", [page for page in PAGES if "here" in map(place, commands(page))], ids=lambda page: page.stem
)
def test_commands_run(page: Path, openmpi: Mpi, tmp_path: Path) -> None:
    environment = {
        "PATH": f"{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",  # mpirun with more ranks than cores
    }
    make_folder(page, tmp_path)
    for command in commands(page):
        if place(command) != "here":
            continue
        for shown, here in SITE.items():
            command = command.replace(shown, here)
        for words in [*make_missing_files(command, tmp_path), ["bash", "-c", shortened(command)]]:
            done = run(words, timeout=120, env=environment, cwd=tmp_path)
            assert done.returncode == 0, f"{words}\n{done.stdout}{done.stderr}"
