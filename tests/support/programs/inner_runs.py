"""Starts other runs in each rank, then fails: ``inner_runs.py FOLDER JOB``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

PRINTS = (
    "import json, os; print(json.dumps({name: os.environ[name] for name in ('RANK', 'WORLD_SIZE', 'MASTER_PORT')}))"
)


def call(*words: str) -> list[str]:
    """Run a command, which must succeed; return the lines that it prints, without the prefix of the rank."""
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return [line[line.find("{") :] for line in done.stdout.splitlines()]


folder, job = Path(sys.argv[1], os.environ["RANK"]), sys.argv[2]
python = [sys.executable, "-m", "mpitrain"]
train = [*python, "train", job, "--train-steps", "2"]
mpirun = [str(Path(sys.executable).with_name("mpirun")), "-n", "2"]
found = {
    "outer": [json.dumps(dict(os.environ))],
    "run": call(*python, "run", "-n", "2", "--run-dir", f"{folder}/run", "--", sys.executable, "-c", PRINTS),
    "exec": call(*python, "exec", "--run-dir", f"{folder}/exec", "--", sys.executable, "-c", PRINTS),
}
if "PMIX_NAMESPACE" in os.environ:  # without it, several ranks of exec do not find each other
    words = ["exec", "--run-dir", f"{folder}/mpirun exec", "--", sys.executable, "-c", PRINTS]
    found["mpirun exec"] = call(*mpirun, *python, *words)
call(*train, "--run-dir", f"{folder}/train")
call(*mpirun, *train, "--run-dir", f"{folder}/mpirun")
(folder / "found.json").write_text(
    json.dumps({name: [json.loads(line) for line in lines] for name, lines in found.items()})
)
while len([*folder.parent.glob("*/found.json")]) < int(os.environ["WORLD_SIZE"]):  # the first failure ends all ranks
    time.sleep(0.01)
raise ArithmeticError("the outer program fails")
