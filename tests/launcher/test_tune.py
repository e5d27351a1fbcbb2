"""``mpitrain tune`` on real ranks."""

from __future__ import annotations

import json
from pathlib import Path

from ..support.launch import JOBS, Mpi, one_line, run


def test_tuning_predicts_and_measures_what_may_change(openmpi: Mpi, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    words = [str(openmpi.python), "-m", "mpitrain", "tune", "-n", "2", "--seconds", "1", "--may-change", "mode,batch"]
    done = run([*words, "-o", str(file), str(JOBS / "small.py"), "--no-normalize"], timeout=170, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(file.read_text())
    configurations = result["configurations"]
    assert {"mode": "async"} in [one["options"] for one in configurations]
    assert {"batch_size": 24} in [one["options"] for one in configurations]
    assert len(configurations) <= 40
    measured = [one for one in configurations if one["measured_examples_per_s"] is not None]
    assert {} in [one["options"] for one in measured]
    assert len(measured) > 1  # larger batches or async are faster for such a small model
    assert result["use"] in [one["options"] for one in measured]
    scores = {json.dumps(one["options"]): one["measured_examples_per_s"] * one["worth"] for one in measured}
    if result["use"]:
        assert scores[json.dumps(result["use"])] == max(scores.values()) >= 1.05 * scores["{}"]
    else:
        assert max(scores.values()) < 1.05 * scores["{}"]
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


def test_an_unknown_change_is_refused(openmpi: Mpi, tmp_path: Path) -> None:
    words = [str(openmpi.python), "-m", "mpitrain", "tune", "--may-change", "speed", str(JOBS / "small.py")]
    done = run(words, timeout=60, cwd=tmp_path)
    assert done.returncode == 2
    assert "--may-change" in one_line(done.stderr)
