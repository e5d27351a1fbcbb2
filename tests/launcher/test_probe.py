"""``mpitrain probe`` on real ranks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mpitrain.predict.measurements import read_probe

from ..support.launch import JOBS, Mpi, one_line, run

_BATCH = 12


def test_a_probe_measures_everything_that_predictions_need(openmpi: Mpi, tmp_path: Path) -> None:
    file = tmp_path / "probe.json"
    words = [str(openmpi.python), "-m", "mpitrain", "probe", "-n", "2", "-o", str(file), str(JOBS / "small.py")]
    done = run(words, timeout=90, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    probe = read_probe(file)
    assert probe.ranks.ranks_per_node == (2,)
    assert probe.job.batch == _BATCH
    assert probe.compute.batches == (3, 6, 12, 24)
    times = np.array([probe.compute.load_s, probe.compute.forward_s, probe.compute.backward_s])
    assert (times > 0).all() and (times < 1).all()
    assert np.all(np.diff(np.array(probe.job.ready)[np.argsort(probe.job.layer_starts)]) <= 0)  # last layers first
    assert probe.within is not None and probe.within.bytes_per_s > 1e7 and probe.between is None
    assert {"int8", "bfloat16"} <= probe.codecs.keys()
    assert probe.codecs["int8"].share == pytest.approx(0.26, abs=0.03)
    assert probe.server.apply_s > 0 and len(probe.compute.update_s) == 3
    assert min(probe.step_factors) > 0
    assert [path.name for path in tmp_path.iterdir()] == ["probe.json"]


def test_an_option_of_modes_is_refused(openmpi: Mpi, tmp_path: Path) -> None:
    words = [str(openmpi.python), "-m", "mpitrain", "probe", "--mode", "async", str(JOBS / "small.py")]
    done = run(words, timeout=60, cwd=tmp_path)
    assert done.returncode == 2
    assert "--mode" in one_line(done.stderr)
