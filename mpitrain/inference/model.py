"""Load trained models, evaluate them, and compute predictions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from .. import checkpoint
from ..core import subnormals
from ..core.layout import Array
from ..data.batch import Batch
from ..data.split import DatasetSplit, Split
from ..data.trees import describe
from ..errors import ConfigError, DataError, JobError, UserError
from ..models.base import Model
from ..nn.layer import Layer
from ..plan.job import Job
from ..plan.layer_network import LayerNetwork
from ..plan.metric import PREFIX, Totals, measure_parts
from ..plan.network import TorchModule
from .restore import Trained, restore


class TrainedModel:
    """A trained model of layers, for inference on the CPU.

    Attributes:
        step: The number of steps that it was trained for.
        path: The checkpoint that it was loaded from.
    """

    def __init__(self, trained: Trained) -> None:
        self.step, self.path = trained.step, trained.path
        self._predictor = Predictor(trained)

    def __call__(self, examples: Array) -> Array:
        """Return the outputs for examples. Local.

        Args:
            examples: Shape ``(n, *shape of an example)``, as the training data stores them: they are scaled as in
                training. Floating-point numbers are used as they are if the training data has integers.

        Returns:
            Shape (n, ...), of the parameters' type; the outputs that the loss takes, such as the scores of classes.
        """
        return self._predictor(np.asarray(examples))


def load(
    path: str | PathLike[str], *, averages: bool = False, model: Job | TorchModule | None = None
) -> TrainedModel | TorchModule:
    """Return a trained model for inference, on the CPU. Local.

    The job's code, as recorded in the run directory, runs in this process: load only runs that you trust. The arrays of
    the checkpoint itself execute no code.

    Args:
        path: A checkpoint, a run directory (its newest checkpoint is loaded), or ``RUN/best`` (the checkpoint that
            ``--keep-best`` keeps).
        averages: Load the moving averages of the parameters, which validation uses if the job has them.
        model: The job or the PyTorch module that was trained, if the run directory has no job file. The module is
            changed.

    Returns:
        A PyTorch module in evaluation mode, which is ``model`` or made by the job; for layers a ``TrainedModel``.

    Raises:
        CheckpointError: The checkpoint does not exist, is damaged, or does not match the job. Or ``model`` is None, and
            the run directory has no record of a job file.
        JobError, DataError: The job cannot be made.
    """
    if isinstance(model, Layer):
        raise JobError(
            "model is a layer, must be a Job or a PyTorch module; pass the job: load(path, model=make_job())"
        )
    if model is not None and not isinstance(model, Job):
        return _load_module(Path(path), model, averages)
    try:
        trained = restore(Path(path), model, averages)
    except DataError as error:
        if model is not None:
            raise
        raise DataError(
            f"{error}; the job reads its data; if it trains a PyTorch module, pass the module: load(path, model=...)"
        ) from error
    if isinstance(trained.job.network, LayerNetwork):
        return TrainedModel(trained)
    from ..pytorch.network import load_values

    module: TorchModule = trained.job.network.model
    load_values(module, trained.layout, trained.params, trained.extra_state)
    return module.eval()


def _load_module(path: Path, module: TorchModule, averages: bool) -> TorchModule:
    """Set the values of a module to the values in a checkpoint; return the module, in evaluation mode."""
    from ..pytorch.network import layout_of, load_values

    with checkpoint.Checkpoint(checkpoint.find(path)[0]) as opened:
        layout = layout_of(module)
        load_values(module, layout, *checkpoint.read_model(opened, layout, averages))
        return module.eval()


def evaluate(path: Path, averages: bool | None = None) -> tuple[int, dict[str, float]]:
    """Return the step of a checkpoint, and loss, accuracy and metrics on the validation examples, as in training.

    Args:
        averages: Whether to use the moving averages; None: if there are any, as in training.

    Raises:
        ConfigError: The job has no validation examples.
        CheckpointError, JobError, DataError: As for ``load``.
    """
    trained = restore(path, averages=averages)
    split, model = trained.job.validation_split, trained.model()
    if split is None:
        raise ConfigError(f"{trained.path}: the job has no validation examples; add some: Job(validation=...)")
    job = trained.job
    parts: list[tuple[Any, Any]] = []

    def keep(outputs: Any, labels: Any) -> None:
        parts.append((outputs, labels))

    sums = np.zeros(len(Totals._fields))
    with subnormals.flushed(trained.config.device.flush_denormals):
        for batch in _batches(trained, split):
            sums += model.evaluate(batch, keep if job.metrics else None)
    values = Totals(*sums.tolist()).means()
    if job.metrics:
        values |= measure_parts(job.metrics, job.network.joined, parts)
    return trained.step, {PREFIX + name: value for name, value in values.items()}


class Predictor:
    """Computes a trained model's outputs for arrays."""

    def __init__(self, trained: Trained) -> None:
        self._trained = trained
        self._model: Model = trained.model()
        self._dtype = trained.params.dtype
        self._size = _batch_size(trained)

    def __call__(self, examples: Array | Mapping[str, Array]) -> Array:
        """Return the outputs for examples; see ``TrainedModel``.

        Args:
            examples: An array; or for a PyTorch module with several inputs arrays by the names of its arguments.

        Raises:
            JobError: The model does not accept the examples.
        """
        arrays = examples if isinstance(examples, Mapping) else {"": examples}
        counts = {len(array) if array.ndim else 0 for array in arrays.values()}
        if len(counts) != 1 or 0 in counts:
            raise JobError(
                f"the examples have shapes {_shapes(arrays)}: must have the same first dimension, at least 1"
            )
        outputs = []
        with subnormals.flushed(self._trained.config.device.flush_denormals):
            for start in range(0, counts.pop(), self._size):
                parts = {name: array[start : start + self._size] for name, array in arrays.items()}
                outputs.append(self._outputs(parts))
        return np.concatenate(outputs)

    def _outputs(self, parts: Mapping[str, Array]) -> Array:
        """Return the outputs for one batch; an error of the model's code is described in one line."""
        batch = Batch(self._prepared(parts), None, 0)
        try:
            return self._model.predict(batch)
        except UserError:
            raise
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise JobError(
                f"the model does not accept a batch of shape {_shapes(parts)}: {reason}; in training, a batch of one "
                f"example is {describe(self._trained.job.train_split.read_batch(0, 1).examples)}"
            ) from error

    @cached_property
    def _floating_point_input(self) -> str:
        """The dtype of a dataset's inputs if it is a floating-point type; empty for other dtypes and other splits."""
        train, dtype = self._trained.job.train_split, ""
        if isinstance(train, DatasetSplit):
            with suppress(DataError):  # the first example is no longer available
                examples = train.read_batch(0, 1).examples
                inputs = examples[0] if isinstance(examples, (tuple, list)) else examples
                dtype = str(getattr(inputs, "dtype", ""))
        return dtype if "float" in dtype else ""

    def _prepared(self, parts: Mapping[str, Array]) -> Any:
        train = self._trained.job.train_split
        if set(parts) != {""}:
            if isinstance(self._trained.job.network, LayerNetwork):
                raise JobError(f"the input has several arrays, {_shapes(parts)}: must be one array of examples")
            return parts
        (examples,) = parts.values()
        if train.is_array and examples.shape[1:] != train.shape:
            raise JobError(f"an example has shape {examples.shape[1:]}: must have {train.shape}, as in training")
        if examples.dtype.kind in "biu" and (dtype := self._floating_point_input):
            raise JobError(
                f"the examples have the type {examples.dtype}, but {dtype} in training: transform them as in training"
            )
        if train.has_integers and examples.dtype.kind == "f":  # scaled already
            return examples.astype(self._dtype)
        return train.scaled(examples, _input_dtype(self._trained, train))


def _shapes(arrays: Mapping[str, Array]) -> str:
    return ", ".join(f"{name} {array.shape}".strip() for name, array in arrays.items())


def _batches(trained: Trained, split: Split) -> Iterator[Batch]:
    """Yield the examples of a split in order."""
    size, count, seed = _batch_size(trained), len(split), trained.config.training.seed
    ranges = [(start, min(start + size, count)) for start in range(0, count, size)]
    own = split.own_loader(seed)
    if own is not None:
        for start, stop in ranges:
            yield own.sequential(start, stop)
        return
    whole = split.read_batch(0, count) if split.block is None else None  # the file cannot be read in ranges
    for start, stop in ranges:
        batch = split.read_batch(start, stop) if whole is None else whole.part(start, stop)
        yield Batch(split.scaled(batch.examples, _input_dtype(trained, split)), batch.labels, start)


def _input_dtype(trained: Trained, split: Split) -> Any:
    """Return the dtype of the model's input; None for integers, which keep their stored type."""
    return None if trained.job.network.takes_integers(split) else trained.params.dtype


def _batch_size(trained: Trained) -> int:
    """Return the number of examples per batch of validation: as many as a micro-batch of training."""
    training = trained.config.training
    assert training.batch_size is not None
    return -(-training.batch_size // training.accumulate_steps)
