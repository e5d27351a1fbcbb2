"""The commands on the documentation pages, shortened for tests, and the files that they use.

A command is an indented line that begins with a program's name. Commands of a page run in their order, in one folder.
"""

from __future__ import annotations

import re
from pathlib import Path

from .launch import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_COMMAND = re.compile(r"^ {4}((?:mpitrain|mpirun|python|srun|sbatch) (?:.*\\\n)*.*)$", re.MULTILINE)
# Commands that no test of pages executes, and why.
_NOT_EXECUTED = {
    r"(FLAGS|ARGUMENTS)": "a pattern, not a command",
    r"mpitrain (probe|simulate|tune)": "takes a minute or more; tests/launcher/test_probe.py and test_tune.py",
    r"mpitrain scale": "changes a live run; tests/launcher/test_recovery.py",
    r"(lightning|accelerate)_script": "needs other environments; tests/torch/test_programs.py",
    r"--stage-env": "copies the whole environment; tests/hosts/test_staging.py",
    r"^srun": "in a batch script; slurm/srun.sbatch is executed",
}
_SLURM = re.compile(r"^(sbatch|mpitrain submit)\b")
_HOSTS = re.compile(r"--hosts|--hostfile| -H ")
# Numbers of steps are divided by this number; a run has 20 steps where the page names no number.
_FACTOR = 500
_STEPS = re.compile(r"--(train-steps|save-steps|keep-every|validate-steps|local-after)[ =](\d+)")
_OWN_STEPS = re.compile(r"--train-steps|(^|/| )(train|trainer_digits|ddp_script|elastic|program)\.py| -- | -m ")

TRAIN = """
import argparse
import torch
import mpitrain

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.01)
parser.add_argument("--epochs", type=int, default=2)
arguments = parser.parse_args()
torch.manual_seed(0)
model = torch.nn.Linear(6, 2)
trainer = mpitrain.Trainer(model, torch.optim.SGD(model.parameters(), lr=arguments.lr))
inputs = torch.randn(96, 6)
loader = trainer.loader(torch.utils.data.TensorDataset(inputs, (inputs.sum(1) > 0).long()), batch_size=8)
for epoch in trainer.epochs(arguments.epochs):
    for batch, labels in loader:
        trainer.backward(torch.nn.functional.cross_entropy(model(batch), labels))
        trainer.step()
"""
JOB = """
import numpy as np
from mpitrain import Job, data, nn, optim


def job(hidden_units: int = 16) -> Job:
    digits = data.mnist()
    return Job(
        model=nn.Sequential(nn.Dense(64, hidden_units), nn.ReLU(), nn.Dense(hidden_units, 10)),
        loss=nn.SoftmaxCrossEntropy(),
        optimizer=optim.adam(0.001),
        train=digits.train,
        validation=digits.validation,
        metrics={"auc": lambda outputs, labels: float(np.mean(outputs.argmax(1) == labels))},
    )
"""


def commands(page: Path) -> list[str]:
    """Return the commands of a page that a test executes, without comments."""
    found = (re.sub(r"\s+# .*", "", command) for command in _COMMAND.findall(page.read_text(encoding="utf-8")))
    return [command for command in found if not any(re.search(pattern, command) for pattern in _NOT_EXECUTED)]


def place(command: str) -> str:
    """Return where a command runs: ``slurm``, ``hosts`` or ``here``."""
    return "slurm" if _SLURM.search(command) else "hosts" if _HOSTS.search(command) else "here"


def shortened(command: str) -> str:
    """Return the command, changed so that it trains for a few steps."""
    command = _STEPS.sub(lambda match: f"--{match[1]} {max(1, int(match[2]) // _FACTOR)}", command)
    if command.startswith(("mpitrain run ", "mpitrain submit ")) and not _OWN_STEPS.search(command):
        command = re.sub(r"^mpitrain \w+", r"\g<0> --train-steps 20", command)
    return command


def make_folder(page: Path, folder: Path) -> None:
    """Make a folder with the files that the commands of a page use."""
    folder.mkdir(exist_ok=True)
    for name in ("jobs", "slurm"):
        (folder / name).symlink_to(ROOT / name)
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    files = {"train.py": TRAIN, "job.py": JOB, "digits.py": JOB, "package/train.py": TRAIN, "hosts": "a:4\nb:4\n"}
    if page.stem == "horovod":
        files |= dict(zip(("train.py", "elastic.py"), blocks, strict=True))
    if page.stem == "torch":
        files["job.py"] = blocks[0]
    if page.stem == "torch_backend":
        files["program.py"] = blocks[0]
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    for name in ("simulate", "my_program"):
        (folder / name).write_text('#!/bin/sh\n[ -n "$RANK" ]\n', encoding="utf-8")
        (folder / name).chmod(0o755)
