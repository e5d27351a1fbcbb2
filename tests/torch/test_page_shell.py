"""Commands for one host on the documentation pages are run, with fewer ranks and steps."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from mpitrain import data

from ..support.launch import run
from ..support.page_shell import PAGES, commands, make_folder, place, shortened
from ..support.world.controller import World

# Replacements for texts that are valid only at the reader's site.
SITE = {"/scratch/me/runs": "runs", " RUN ": " runs/wide "}


def with_fewer_workers(command: str) -> str:
    """Return the command with at most two workers that are needed, and its servers."""
    others = sum(map(int, re.findall(r"--(?:ps|backup-workers) (\d+)", command)))
    return re.sub(r"(?<= -n )\d+", lambda match: str(min(int(match[0]), 2 + others)), command)


def make_missing_files(command: str, folder: Path, world: World) -> None:
    """Train the runs that a command reads, unless they exist; write the command's other inputs."""
    for name in re.findall(r"(?<!--run-dir )(?<!--join )runs/(\w+)", command):
        if not (folder / "runs" / name).exists():
            world.train(2, "job.py", "--train-steps", "20", "--run-dir", f"runs/{name}", cwd=folder)
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
def test_commands_run(page: Path, world: World, tmp_path: Path) -> None:
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
        if page.stem != "launching":  # whose second command continues a run on fewer ranks
            command = with_fewer_workers(command)
        make_missing_files(command, tmp_path, world)
        done = run(["bash", "-c", shortened(command)], timeout=120, env=environment, cwd=tmp_path)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
