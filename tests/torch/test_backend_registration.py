"""The registration of the backend with PyTorch: by the entry point, or by ``import mpitrain``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from ..support.launch import Mpi, run

IS_REGISTERED = (
    "import torch.distributed as dist; assert 'mpitrain' in dist.Backend.backend_list, dist.Backend.backend_list"
)


@pytest.mark.parametrize(
    "program",
    [
        f"import torch; {IS_REGISTERED}",
        f"import mpitrain, torch; {IS_REGISTERED}",
        f"import torch, mpitrain; {IS_REGISTERED}",
    ],
)
def test_the_backend_is_registered(program: str) -> None:
    done = run([sys.executable, "-c", program])
    assert done.returncode == 0, done.stderr


def test_without_entry_points_mpitrain_registers_it_if_torch_is_there() -> None:
    done = run(
        [sys.executable, "-c", f"import torch, mpitrain; {IS_REGISTERED}"], env={"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    )
    assert done.returncode == 0, done.stderr


def test_registering_imports_nothing() -> None:
    program = """
import os
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
import sys, torch
before = set(sys.modules)
import mpitrain_torch
mpitrain_torch.register()
print(*(set(sys.modules) - before))
"""
    assert run([sys.executable, "-c", program]).stdout.split() == ["mpitrain_torch"]


def test_torch_imports_with_a_broken_installation(tmp_path: Path) -> None:
    (tmp_path / "mpitrain").mkdir()
    (tmp_path / "mpitrain" / "__init__.py").write_text("raise OSError('broken')")
    environment = {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    done = run([sys.executable, "-c", f"import torch; {IS_REGISTERED}"], env=environment)
    assert done.returncode == 0, done.stderr


def test_torchrun_is_refused_with_what_to_do(openmpi: Mpi, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import torch.distributed as dist; dist.init_process_group('mpitrain')")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(program)]
    done = run(torchrun, timeout=60)
    assert done.returncode != 0
    assert "start the program with 'mpirun -n 2 python PROGRAM'" in done.stderr
