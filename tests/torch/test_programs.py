"""Programs of the guide "Run an existing program", and ``jobs/ddp_script.py``, under ``mpitrain run``."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ..support.launch import ROOT, Mpi, missing, run, torchrun

PAGE = (ROOT / "docs" / "programs.md").read_text(encoding="utf-8")
DDP = ROOT / "jobs" / "ddp_script.py"
PROGRAMS = ROOT / ".venv-programs" / "bin" / "python"


def example(heading: str) -> str:
    """Return the first Python block below a heading of the guide."""
    return re.search(rf"^## {heading}$.*?```python\n(.*?)```", PAGE, re.DOTALL | re.MULTILINE)[1]


def start(*words: object, folder: Path) -> subprocess.CompletedProcess[str]:
    return run([sys.executable, "-m", "mpitrain", "run", "-n", "2", *map(str, words)], timeout=120, cwd=folder)


def test_a_ddp_script_trains_as_under_torchrun(openmpi: Mpi, tmp_path: Path) -> None:
    words = [str(DDP), "--epochs", "2", "--checkpoint"]
    assert start(*words, tmp_path / "ours.pt", folder=tmp_path).returncode == 0
    torchrun(sys.executable, *words, tmp_path / "torchrun.pt", cwd=tmp_path)
    ours, theirs = (torch.load(tmp_path / f"{name}.pt")["model"] for name in ("ours", "torchrun"))
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-5, atol=1e-6)


def test_threads_of_gloo_release_their_tensors_before_the_interpreter_ends(openmpi: Mpi, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "total = torch.ones(1)\n"
        "dist.all_reduce(total)\n"
        "for thread in map(int, os.listdir('/proc/self/task')):\n"
        "    os.sched_setaffinity(thread, {min(os.sched_getaffinity(0))})\n"
        "    if 'gloo_runloop' in open(f'/proc/self/task/{thread}/comm').read():\n"
        "        os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))  # runs when the main thread sleeps\n"
        "for _ in range(20):\n"
        "    dist.all_reduce(total)\n"
    )
    done = start(script, folder=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("heading", ["Lightning", "Accelerate"])
def test_the_guides_scripts_train(heading: str, openmpi: Mpi, tmp_path: Path) -> None:
    if not PROGRAMS.exists():
        missing(f"an environment with {heading} ({PROGRAMS}); 'make env' makes it")
    script = tmp_path / "script.py"
    script.write_text(
        example(heading)
        + "import os\nparameters = torch.cat([p.detach().flatten() for p in model_of().parameters()])\n"
        "torch.save((loss_of_last(), parameters), f'{os.environ[\"RANK\"]}.pt')\n"
    )
    prelude = {
        "Lightning": "def model_of(): return trainer.model\ndef loss_of_last(): return 0\n",
        "Accelerate": "def model_of(): return model\ndef loss_of_last(): return loss.item()\n",
    }[heading]
    script.write_text(prelude + script.read_text())
    done = start("--", PROGRAMS, script, folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (_, first), (_, second) = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    assert torch.equal(first, second)
    assert (first[:20] - 1).abs().max() < 0.5  # has learned that the label is the sum


def test_the_guides_mpi_program(openmpi: Mpi, tmp_path: Path) -> None:
    (tmp_path / "sum.py").write_text(example("Programs that use MPI"))
    done = start("sum.py", folder=tmp_path)
    assert done.returncode == 0 and done.stdout == "sum of ranks 1\n"


def test_the_guides_loop_reports_progress(openmpi: Mpi, tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text("batches = range(7)\n" + example("Hangs"))
    done = start("--run-dir", "run", "loop.py", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    from mpitrain.monitor.heartbeat import read

    status = read(tmp_path / "run")
    assert status is not None and (status.state, status.step) == ("finished", 6)
