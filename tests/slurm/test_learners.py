"""Learners in a job array of a preemptible partition: each element starts when it gets a node, and may lose it."""

from __future__ import annotations

import json
import re
from pathlib import Path

from mpitrain.strategy.learners.ledger import Ledger
from mpitrain.strategy.learners.store import Folder, Register

from ..support.launch import JOBS, Mpi
from ..support.slurm.site import Site
from ..support.waiting import wait_until

FLAGS = ("--nodes", "1", "--partition", "low", "--time", "5", JOBS / "slow.py", "--pause", "0.05")
FLAGS += ("--train-steps", "3500", "--validate-steps", "0")


def state(folder: Path, name: str) -> dict[str, int]:
    path = folder / "exchange" / f"state.{name}"
    return json.loads(path.read_bytes()) if path.exists() else {}


def logs(folder: Path) -> str:
    return "".join(path.read_text() for path in sorted((folder / "learners" / "batch").glob("*.log")))


def test_an_array_completes_when_an_element_is_preempted(site: Site, openmpi: Mpi) -> None:
    folder = site.folder / "learners"
    done = site.call(openmpi, "--join", folder, "--array", "0-2", *FLAGS)
    assert done.returncode == 0, done.stderr
    number = re.findall(r"job (\d+): ", done.stdout)[0]
    try:
        for task in range(3):
            wait_until(lambda task=task: state(folder, f"task-{task}").get("examples", 0) > 100, lambda: logs(folder))
        node = site.cluster.call("squeue", "-h", "-j", f"{number}_1", "-o", "%N").stdout.strip()
        taker = ["--partition=high", f"--nodelist={node}", "--exclusive", "--output=/dev/null", "--wrap=sleep 1"]
        site.cluster.call("sbatch", "--parsable", *taker)
        site.cluster.restart_now(f"{number}_1")
        assert site.cluster.wait(number) == "COMPLETED", logs(folder)
    finally:
        site.cluster.call("scancel", number, check=False)
    ledger = Ledger.parse(Register(Folder(folder / "exchange"), "ledger", 64).read().data)
    assert ledger.is_given_out and ledger.total == 3500 * 4 and not ledger.living
    assert ledger.members["task-1"].generation > 2
