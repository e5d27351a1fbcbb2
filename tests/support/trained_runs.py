"""Run directories of a softmax regression, written without training."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mpitrain import checkpoint
from mpitrain.core.layout import Array
from mpitrain.monitor.run_record import RunRecord
from mpitrain.plan.job import load_job_file

FEATURES, CLASSES, EXAMPLES = 5, 3, 11
JOB = f"""
import numpy as np

from mpitrain import Job, data, nn, optim


def accuracy_of_two(outputs, labels):
    return float((outputs[:2].argmax(1) == labels[:2]).mean())


def examples(count, seed):
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (count, {FEATURES})).astype(np.uint8)
    return data.from_arrays(images, rng.integers(0, {CLASSES}, count), classes={CLASSES}, scale=1 / 255)


def unchanged(pair):
    return pair


def job(bias: bool = True, validates: bool = True, measures: bool = False, hidden: int = 0, maps: bool = False) -> Job:
    validation = examples({EXAMPLES}, 1)
    hidden_layers = [nn.Dense({FEATURES}, hidden)] if hidden else []
    return Job(
        model=nn.Sequential(*hidden_layers, nn.Dense(hidden or {FEATURES}, {CLASSES}, bias=bias)),
        loss=nn.SoftmaxCrossEntropy(),
        optimizer=optim.sgd(0.1),
        train=examples(20, 0),
        validation=(validation.map(unchanged) if maps else validation) if validates else None,
        metrics={{"two": accuracy_of_two}} if measures else {{}},
        batch_size=4,
        train_steps=8,
    )
"""


class TrainedRun:
    """A run directory with a record and checkpoints.

    Args:
        arguments: The recorded arguments of the job.
        options: The recorded options.

    Attributes:
        path: The run directory.
        job_file: The job file.
        job: The job.
    """

    def __init__(self, folder: Path, arguments: Mapping[str, Any] | None = None, **options: Any) -> None:
        self.path, self.job_file = folder / "run", folder / "source" / "a_job.py"
        self.job_file.parent.mkdir()
        self.job_file.write_text(JOB)
        defaults = {"bias": True, "validates": True, "measures": False, "hidden": 0, "maps": False}
        self.arguments, self.options = {**defaults, **(arguments or {})}, {"batch_size": 4, "seed": 3, **options}
        self.job = load_job_file(self.job_file)(**self.arguments)
        self.layout = self.job.network.lay_out(self.job.train_split, np.dtype(options.get("dtype", "float32")))
        self.path.mkdir()

    def record(self, step: int = 0) -> None:
        """Write the record of a start at a step."""
        tables = {"run": self.options, "job": self.arguments, "versions": {}}
        RunRecord(self.path, tables, self.job_file, "").write(step)

    def save(self, step: int, averages: bool = False) -> dict[str, Array]:
        """Write a checkpoint of random values; return the vectors."""
        rng = np.random.default_rng(step)
        dtype = np.dtype(self.options.get("dtype", "float32"))
        vectors = {}
        for name in ("params", *(["average"] if averages else [])):
            vectors[name] = np.zeros(self.layout.size, dtype)
            for view in self.layout.views(vectors[name]).values():
                view[...] = rng.standard_normal(view.shape)
        path = checkpoint.path_for(self.path / "checkpoints", step)
        path.parent.mkdir(exist_ok=True)
        checkpoint.write(path, self.layout, checkpoint.Snapshot(vectors, step, 0), 3, {})
        return vectors

    def scores(self, vector: Array, examples: Array) -> Array:
        """Return the outputs of the model with the parameters in a vector, in float64."""
        weight, *bias = self.layout.views(vector.astype(np.float64)).values()
        return examples.astype(np.float64) @ weight + (bias[0] if bias else 0.0)  # type: ignore[no-any-return]
