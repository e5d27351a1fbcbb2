"""A strategy that a user writes next to the job file, selected by ``--mode module:Class``."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mpitrain import checkpoint

from ..support.launch import ROOT, Mpi

# Averages the gradients of every second step, like gradient accumulation over steps.
STRATEGY = '''
import numpy as np
from mpi4py import MPI

from mpitrain.strategy.bulk_synchronous import BulkSynchronous


class EverySecondStep(BulkSynchronous):
    """Sums gradients over two steps and all workers, then updates; workers do not communicate in between."""

    def __init__(self, cluster, plan, devices, initial_state):
        self.comm, size = cluster.workers, plan.layout.size
        self.vectors = {name: np.zeros(size, plan.dtype) for name in plan.vectors}
        self.params, self.grads = self.vectors["params"], np.zeros(size, plan.dtype)
        self.total = np.zeros_like(self.grads)
        step, data_cursor, _ = initial_state(self.vectors, 0)
        super().__init__(plan, self.comm.rank, step, data_cursor)
        self.updater = plan.updater(self.vectors)

    def finish(self):
        self.total += self.grads
        self._count(self.comm.allreduce(float(self._loss)), updated=True)
        step = self.progress.step
        if step % 2 == 0:
            self.comm.Allreduce(MPI.IN_PLACE, self.total)
            self._await_release()
            self.updater.update(0, len(self.params), self.total[np.newaxis] / 2, step // 2 - 1)
            self.total[:] = 0
            self._reach(self.comm.allreduce(self._flags, op=MPI.BOR))

    def vector(self, name):
        return self.vectors[name]

    def close(self):
        pass
'''


def train(mpi: Mpi, folder: Path, steps: int, *flags: str) -> dict[str, np.ndarray]:
    """Train on two ranks, which share an epoch's examples; return the arrays of the last checkpoint."""
    words = [ROOT / "jobs" / "mnist_mlp.py", "--run-dir", folder, "--train-steps", str(steps), *flags]
    mpi.train(2, *words, env={"PYTHONPATH": f"{ROOT}:{folder.parent}"})
    with checkpoint.Checkpoint(checkpoint.path_for(folder / "checkpoints", steps)) as file:
        return {name: file.read(name) for name in file.datasets if name.startswith("params/")}


@pytest.mark.quick
def test_a_strategy_of_a_user(openmpi: Mpi, tmp_path: Path) -> None:
    """Two steps with half the batch are one step of ``sync``; a resumed run gives the same bits."""
    (tmp_path / "own_strategy.py").write_text(STRATEGY)
    mode = ("--mode", "own_strategy:EverySecondStep", "--batch-size", "50")
    expected = train(openmpi, tmp_path / "sync", 10, "--batch-size", "100")
    found = train(openmpi, tmp_path / "own", 20, *mode, "--save-steps", "4")
    assert expected.keys() == found.keys() and expected
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-3, atol=1e-5, err_msg=name)
    assert sorted(checkpoint.steps(tmp_path / "own" / "checkpoints")) == [4, 8, 12, 16, 20]
    train(openmpi, tmp_path / "resumed", 8, *mode)
    resumed = train(openmpi, tmp_path / "resumed", 20, *mode)
    assert all(resumed[name].tobytes() == array.tobytes() for name, array in found.items())


@pytest.mark.quick
@pytest.mark.parametrize("mode", ["no_such_module:Class", "json:NoSuchClass"])
def test_a_mode_that_does_not_exist_is_one_line(openmpi: Mpi, tmp_path: Path, mode: str) -> None:
    words = ["-m", "mpitrain", "train", ROOT / "jobs" / "mnist_mlp.py", "--run-dir", tmp_path, "--mode", mode]
    done = openmpi.run(2, *words)
    assert done.returncode == 2
    lines = [line for line in done.stderr.splitlines() if line.startswith("mpitrain:")]
    assert len(lines) == 1 and mode in lines[0] and "Traceback" not in done.stderr, done.stderr
