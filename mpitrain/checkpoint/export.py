"""A checkpoint's parameters in the formats of others."""

from __future__ import annotations

import importlib
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..core.layout import Array
from ..errors import CheckpointError
from .disk import replacing
from .reader import Checkpoint

FORMATS = ("safetensors", "npz")
TYPES = ("float64", "float32", "float16", "bfloat16")


def export(checkpoint: Checkpoint, path: Path, to: str, dtype: str | None = None, averages: bool = False) -> int:
    """Write the parameters, or their moving averages, to ``path``; return how many arrays.

    Args:
        to: One of ``FORMATS``.
        dtype: One of ``TYPES``, or None for that of the checkpoint. Values are rounded to nearest, ties to even.

    Raises:
        DamagedCheckpoint: Values are not as they were written.
        CheckpointError: A value does not fit the type, the format has no such type, or a library is missing.
        OSError: ``path`` cannot be written.
    """
    if to == "npz" and dtype == "bfloat16":
        raise CheckpointError("--to npz --dtype bfloat16: NumPy has no such type; give --to safetensors, or float16")
    group = "averages" if averages else "params"
    if group not in checkpoint.attributes:
        raise CheckpointError(f"{checkpoint.path} holds no {group}: export it without --averages")
    names = [name for name in checkpoint.datasets if name.startswith(f"{group}/")]
    arrays = {name.partition("/")[2]: _convert(checkpoint, name, dtype) for name in names}
    about = {"format": "mpitrain", "step": str(checkpoint.step), "source": checkpoint.path.name}
    data = _library("safetensors.numpy").save(arrays, about) if to == "safetensors" else _npz(arrays)
    with replacing(path) as writer:
        writer.append(np.frombuffer(data, np.uint8))
    return len(arrays)


def _convert(checkpoint: Checkpoint, name: str, dtype: str | None) -> Array:
    values = checkpoint.read(name)
    if dtype is None:
        return values
    wanted = _library("ml_dtypes").bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    with np.errstate(over="ignore"):
        converted: Array = values.astype(wanted)
    # A weight that becomes infinite makes a model of NaN, which is found long after the export.
    lost = np.isfinite(values) & ~np.isfinite(converted.astype(np.float64))
    if lost.any():
        largest = np.abs(values[lost]).max()
        raise CheckpointError(f"{name} has values up to {largest:.3g}, too large for {dtype}: give another --dtype")
    return converted


def _npz(arrays: Mapping[str, Array]) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **dict(arrays))
    return buffer.getvalue()


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise CheckpointError(f"this export needs {name.partition('.')[0]}: pip install 'mpitrain[export]'") from error
