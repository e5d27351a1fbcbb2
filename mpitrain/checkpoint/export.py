"""Export a checkpoint's parameters to other formats."""

from __future__ import annotations

import importlib
import io
import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..core.layout import Array
from ..errors import CheckpointError, DamagedCheckpoint
from .disk import replacing
from .reader import Checkpoint


def export(checkpoint: Checkpoint, path: Path, to: str, dtype: str | None = None, averages: bool = False) -> int:
    """Write the parameters, or their moving averages, to ``path``; return the number of arrays.

    For a PyTorch module the arrays of its ``state_dict`` are written: shared parameters under each name, and all
        persistent buffers.

    Args:
        checkpoint: The checkpoint to export.
        path: The output file.
        to: ``safetensors`` or ``npz``.
        dtype: One of ``TYPES``, or None for the checkpoint's dtypes. Values are rounded to nearest, ties to even.
        averages: Whether to write the moving averages.

    Raises:
        DamagedCheckpoint: The checkpoint's values are damaged.
        CheckpointError: A value does not fit the dtype, the format does not support the dtype or a name, the checkpoint
            has no averages, or a library is missing.
        OSError: ``path`` cannot be written.
    """
    if to == "npz" and dtype == "bfloat16":
        raise CheckpointError("--to npz does not support --dtype bfloat16; use --to safetensors or --dtype float16")
    group = "averages" if averages else "params"
    if group not in checkpoint.attributes:
        advice = "; remove --averages" if averages else ""
        raise CheckpointError(f"{checkpoint.path} contains no {group}{advice}")
    names = [name for name in checkpoint.datasets if name.startswith(f"{group}/")]
    arrays = {name.partition("/")[2]: _convert(checkpoint, name, dtype) for name in names}
    arrays |= {name: arrays[first] for name, first in _aliases(checkpoint).items() if first in arrays}
    buffers = [name for name in checkpoint.datasets if name.startswith("buffers/")]
    arrays |= {name.removeprefix("buffers/"): checkpoint.read(name) for name in buffers}
    if to == "safetensors" and "__metadata__" in arrays:
        raise CheckpointError("safetensors does not support an array with the name __metadata__; use --to npz")
    metadata = {"format": "mpitrain", "step": str(checkpoint.step), "source": checkpoint.path.name}
    if to == "safetensors":
        data = _library("safetensors.numpy", "pass --to npz").save(arrays, metadata)
    else:
        data = _npz(arrays)
    with replacing(path) as writer:
        writer.append(np.frombuffer(data, np.uint8))
    return len(arrays)


def _aliases(checkpoint: Checkpoint) -> dict[str, str]:
    """Return the further names of shared parameters, each with the first name."""
    try:
        aliases = json.loads(str(checkpoint.attributes["params"].get("aliases", "{}")))
    except (ValueError, RecursionError):
        aliases = None
    if not isinstance(aliases, dict) or not all(isinstance(first, str) for first in aliases.values()):
        raise DamagedCheckpoint(f"{checkpoint.path} is not a valid checkpoint: its list of aliases is malformed")
    return aliases


def _convert(checkpoint: Checkpoint, name: str, dtype: str | None) -> Array:
    values = checkpoint.read(name)
    if dtype is None:
        return values
    wanted = _library("ml_dtypes", "pass another --dtype").bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    with np.errstate(over="ignore"):
        converted: Array = values.astype(wanted)
    # An overflow to infinity would turn the model's outputs into NaN, and would be noticed only long after the export.
    lost = np.isfinite(values) & ~np.isfinite(converted.astype(np.float64))
    if lost.any():
        largest = np.abs(values[lost]).max()
        raise CheckpointError(f"{name} has values up to {largest:.3g}, too large for {dtype}; pass another --dtype")
    return converted


def _npz(arrays: Mapping[str, Array]) -> bytes:
    buffer = io.BytesIO()
    # Writes the same format as numpy.savez, which does not allow all names.
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, array, allow_pickle=False)
    return buffer.getvalue()


def _library(name: str, alternative: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise CheckpointError(
            f"this export requires {name.partition('.')[0]}; run pip install 'mpitrain[export]', or {alternative}"
        ) from error
