"""Commands on the documentation pages that submit jobs. The test cluster is smaller than the cluster on the pages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ..support.launch import Mpi, run
from ..support.page_shell import PAGES, commands, make_folder, place, shortened
from ..support.slurm.site import Site, startup_failed

# Options for the cluster on the pages, and options for the test cluster.
SITE = {
    "--ps-constraint cpu": "--ps-constraint f1",
    "--nodes 4 --gpus-per-node 4": "--nodes 2 --gpus-per-node 1",
    "--nodes=4 --ntasks-per-node=8": "--nodes=3 --ntasks-per-node=2",
    "--nodes 4 --tasks-per-node 8 --spare-hosts": "--nodes 2 --tasks-per-node 2 --spare-hosts",
    "--nodes 4 --tasks-per-node 8": "--nodes 3 --tasks-per-node 2",
    "--nodes 1 --tasks-per-node 8": "--nodes 1 --tasks-per-node 2",
    "--tasks-per-node 4": "--tasks-per-node 2",
    "--min-ranks 24": "--min-ranks 6",
    "--min-ranks 6": "--min-ranks 4",
    "--nodes=4 --partition=spot": "--nodes=3 --partition=low",
    " jobs/mnist_mlp.py": " --train-steps 20 jobs/mnist_mlp.py",
}


@pytest.mark.parametrize(
    ("page", "command"),
    [(page, command) for page in PAGES for command in commands(page) if place(command) == "slurm"],
    ids=lambda value: value.stem if isinstance(value, Path) else re.sub(r"\W+", "-", value)[:60],
)
def test_jobs_complete(page: Path, command: str, site: Site, openmpi: Mpi, tmp_path: Path) -> None:
    make_folder(page, tmp_path)
    for shown, here in SITE.items():
        if shown != " jobs/mnist_mlp.py" or "--train-steps" not in command:
            command = command.replace(shown, here)
    for _ in range(5):
        done = run(["bash", "-c", shortened(command)], env=site.environment(openmpi), cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        (number,) = re.findall(r"^(?:job|Submitted batch job) (\d+)", done.stdout, re.MULTILINE)
        state = site.cluster.wait(number, timeout=120)
        logs = "".join(path.read_text() for path in tmp_path.glob(f"**/*{number}*.log"))
        if state == "COMPLETED" or not startup_failed(logs):
            break
    assert state == "COMPLETED", logs
