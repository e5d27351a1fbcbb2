"""Learners in a job array of a preemptible partition: each element starts when it gets a node, and may lose it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from mpitrain.strategy.learners.ledger import Ledger
from mpitrain.strategy.learners.store import Folder, Register

from ..support.launch import JOBS, Mpi
from ..support.slurm.site import Site
from ..support.waiting import wait_until

FLAGS = ("--nodes", "1", "--partition", "low", "--time", "5", JOBS / "slow.py", "--pause", "0.05")
STEPS = 8000
FLAGS += ("--train-steps", str(STEPS), "--validate-steps", "0")


def state(folder: Path, name: str) -> dict[str, int]:
    path = folder / "exchange" / f"state.{name}"
    return json.loads(path.read_bytes()) if path.exists() else {}


def logs(folder: Path) -> str:
    return "".join(path.read_text() for path in sorted((folder / "learners" / "batch").glob("*.log")))


def test_an_array_completes_when_each_element_is_preempted_twice_and_a_node_dies(site: Site, openmpi: Mpi) -> None:
    folder, cluster = site.folder / "learners", site.cluster
    done = site.call(openmpi, "--join", folder, "--array", "0-2", *FLAGS)
    assert done.returncode == 0, done.stderr
    number = re.findall(r"job (\d+): ", done.stdout)[0]
    seen = [0, 0, 0]

    def wait_for_work(task: int, is_lost: bool) -> None:
        """Wait until an element trains, and has started again if it was lost the last time; ``is_lost``: it will be."""

        def works() -> bool:
            now = state(folder, f"task-{task}")
            has_begun = now.get("generation", 0) >= seen[task] and now.get("examples", 0) > 100 and not now.get("ended")
            return has_begun and cluster.state_of(f"{number}_{task}") == "RUNNING"

        wait_until(works, lambda: logs(folder), 120)
        seen[task] = state(folder, f"task-{task}")["generation"] + is_lost

    def requeue(take: Callable[[str], object], tasks: Sequence[int]) -> None:
        """Let elements lose their nodes, by what ``take`` does with a node, and start again."""
        for task in range(3):
            wait_for_work(task, task in tasks)
        elements = {f"{number}_{task}": cluster.restarts(f"{number}_{task}") for task in tasks}
        for element in elements:
            take(cluster.call("squeue", "-h", "-j", element, "-o", "%N").stdout.strip())
        for element, before in elements.items():
            wait_until(lambda: cluster.restarts(element) > before, lambda: logs(folder), 90)  # noqa: B023
            cluster.restart_now(element)

    def preempt(node: str) -> None:
        taker = ["--partition=high", f"--nodelist={node}", "--exclusive", "--output=/dev/null", "--wrap=sleep 1"]
        cluster.call("sbatch", "--parsable", *taker)

    def crash(node: str) -> None:
        cluster.crash_node(int(node[1:]))
        wait_until(lambda: cluster.state_of(f"{number}_0") != "RUNNING", lambda: logs(folder), 90)
        cluster.start_node(int(node[1:]))
        cluster.wait_for_nodes(node)

    try:
        requeue(preempt, range(3))
        requeue(preempt, range(3))
        requeue(crash, [0])
        assert cluster.wait(number, timeout=180) == "COMPLETED", logs(folder)
    finally:
        cluster.call("scancel", number, check=False)
    ledger = Ledger.parse(Register(Folder(folder / "exchange"), "ledger", 64).read().data)
    assert ledger.is_given_out and ledger.total == STEPS * 4 and not ledger.living
    assert [ledger.members[f"task-{task}"].generation > 2 for task in range(3)] == [True] * 3
