"""An allocation that stays when a node fails (``--no-kill``): the run continues on the other nodes."""

from __future__ import annotations

import json
import time

from ..support.launch import JOBS, Mpi
from ..support.slurm.site import Site

SCRIPT = """#!/bin/bash
#SBATCH --job-name=shrinking --nodes=3 --ntasks-per-node=2 --time=5 --no-kill --no-requeue --output={run_dir}.log
mpitrain run --max-restarts 1 --min-ranks 4 --link-timeout 5 --run-dir {run_dir} {job} \\
    --train-steps 300 --pause 0.05 --log-steps 10 --save-steps 50
"""


def test_a_run_continues_without_a_failed_node(site: Site, mpi: Mpi) -> None:
    run_dir, script = site.folder / f"shrinking-{mpi.name}", site.folder / f"{mpi.name}.sbatch"
    script.write_text(SCRIPT.format(run_dir=run_dir, job=JOBS / "slow.py"))
    number = site.script(mpi, script)
    metrics = run_dir / "metrics.jsonl"
    deadline = time.monotonic() + 90
    while not metrics.exists() or '"step": 60' not in metrics.read_text():
        assert time.monotonic() < deadline, run_dir.with_suffix(".log").read_text()
        time.sleep(0.1)
    site.cluster.crash_node(3)
    try:
        state = site.cluster.wait(number, timeout=120)
        log = run_dir.with_suffix(".log").read_text()
        assert state == "COMPLETED", log
        status = json.loads((run_dir / "status.json").read_text())
        assert (status["step"], status["ranks"]) == (300, "4 workers"), log
        resumed = [line for line in map(json.loads, metrics.read_text().splitlines()) if "resumed" in line]
        assert len(resumed) == 1 and resumed[0]["resumed"] > 0
        assert not any(str(run_dir) in line for node in (1, 2) for line in site.cluster.processes(node))
    finally:
        site.cluster.start_node(3)
        site.cluster.wait_for_nodes("n3")
