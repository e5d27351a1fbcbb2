"""PyTorch modules on GPUs, which a simulator of CuPy provides."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ..support.launch import Mpi
from . import support

PROGRAM = Path(__file__).with_name("on_simulated_gpu.py")


@pytest.mark.parametrize(
    ("n", "flags"),
    [
        (1, ()),
        (2, ("--bucket-bytes", "100")),
        (2, ("--gpu-transport", "host", "--kind", "cnn")),
        (1, ("--devices-per-rank", "2", "--kind", "cnn")),
        (2, ("--accumulate-steps", "2", "--freeze", "--optimizer", "adamw")),
        (1, ("--devices-per-rank", "2", "--freeze", "--optimizer", "adamw")),
        (1, ("--mode", "async", "--kind", "gpt")),
        (2, ("--mode", "local", "--kind", "lstm")),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_gpus_agree_with_processors(
    openmpi: Mpi, simulated: dict[str, str], n: int, flags: tuple[str, ...], tmp_path: Path
) -> None:
    same = ("--dtype", "float64", "--optimizer", "momentum", *flags)
    words = ("train", support.JOB, "--run-dir", tmp_path / "gpu", "--threads", "1", "--device", "gpu")
    done = openmpi.run(n, PROGRAM, *words, *same, env=simulated, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    on_cpu = [flag for flag in same if flag not in ("--gpu-transport", "host")]
    here = support.train(openmpi, n, tmp_path / "cpu", "--device", "cpu", *on_cpu)
    there = support.newest(tmp_path / "gpu")
    for name, value in here.items():
        np.testing.assert_allclose(there[name], value, atol=1e-9, rtol=0, err_msg=name)
