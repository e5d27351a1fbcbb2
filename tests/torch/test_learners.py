"""Scripts with a Trainer as learners (``--join``): together they train each example, and end with one model."""

from __future__ import annotations

import json
import os
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from mpitrain.monitor.metrics import read_lines

from ..support.launch import Mpi
from ..support.waiting import limit
from .support import newest

SCRIPT = Path(__file__).parent / "learner_loop.py"


@pytest.mark.parametrize(
    ("dtype", "device"),
    [("float32", "cpu"), ("bfloat16", "cpu"), ("float32", "gpu")],  # the module has copies of bfloat16 parameters
)
def test_loops_of_two_learners_train_each_example_once_per_epoch(
    openmpi: Mpi, simulated: dict[str, str], tmp_path: Path, dtype: str, device: str
) -> None:
    script, env = SCRIPT, dict(os.environ)
    if device == "gpu":
        script, env = tmp_path / "on_gpu.py", env | simulated
        first, rest = SCRIPT.read_text().split("import json\n", 1)
        script.write_text(f"{first}import json\nfrom tests.torch import on_simulated_gpu\n{rest}")
    command = [openmpi.python, "-m", "mpitrain", "run", "--join", tmp_path / "run", "--device", device]
    learners = [
        subprocess.Popen(
            [*map(str, [*command, "-n", n, script, tmp_path, pause, dtype])], stderr=subprocess.PIPE, text=True, env=env
        )
        for n, pause in ((1, 0.002), (2, 0.004))
    ]
    for learner in learners:
        _, errors = learner.communicate(timeout=limit(120))
        assert learner.returncode == 0, errors
    results = [json.loads((tmp_path / f"{name}.json").read_text()) for name in ("1-0", "2-0", "2-1")]
    counts = Counter(number for result in results for number in result["trained"])
    assert len(counts) == 1000 and min(counts.values()) >= 20 and sum(counts.values()) < 20_100
    assert all(result["trained"] for result in results)
    assert results[1]["params"] == results[2]["params"] and results[1]["values"] == results[2]["values"]
    for result in results:  # the rate follows the common stream
        for epoch, rate in result["rates"]:
            assert rate == pytest.approx(0.01 * (1 - epoch / 20)) or rate == pytest.approx(
                0.01 * (1 - (epoch + 1) / 20)
            )
    stored = {name: values.ravel() for name, values in newest(tmp_path / "run").items()}
    assert any(
        all(
            result["params"][name.removeprefix("params/")] == pytest.approx(stored[name], rel=0.01, abs=1e-4)
            for name in stored
        )
        for result in results
    )
    assert any("validation_loss" in line for line in read_lines(tmp_path / "run" / "metrics.jsonl"))
