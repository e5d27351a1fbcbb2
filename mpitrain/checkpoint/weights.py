"""Parameters for ``--init-from``: from a checkpoint, or from a file that PyTorch or safetensors has written."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from ..core.layout import Array, Layout, Shape
from ..core.words import numbered, one_line
from ..errors import CheckpointError
from .reader import Checkpoint
from .state import Fit, compare

_HDF5 = b"\x89HDF\r\n\x1a\n"  # the first bytes of checkpoints
_PARAMS = "params/"
_STATE_KEYS = ("state_dict", "model_state_dict", "model")  # where training scripts keep the state_dict, in this order
_COMPILED = "_orig_mod."
_WRAPPED = ("module.", "model.")  # prefixes of names in files that were saved from a wrapper of the module


@dataclass(frozen=True)
class Weights:
    """Named arrays in a file.

    Attributes:
        path: The file.
        shapes: The arrays' shapes, by name.
        read_into: Reads named arrays into arrays of the same shapes.
    """

    path: Path
    shapes: Mapping[str, Shape]
    read_into: Callable[[Mapping[str, Array]], None]


def is_torch_file(path: Path) -> bool:
    """Return whether a path is a file that PyTorch or safetensors may have written, and no checkpoint."""
    try:
        return path.is_file() and path.suffix != ".h5" and path.open("rb").read(len(_HDF5)) != _HDF5
    except OSError:  # the error is reported when the file is read
        return path.suffix != ".h5"


def match_of(path: Path, layout: Layout) -> Fit:
    """Return how a file's parameters match a model; values of a checkpoint are not read.

    Raises:
        DamagedCheckpoint: The checkpoint is damaged.
        CheckpointError: No parameter matches, or the file cannot be read.
    """
    with opened(path, layout) as weights:
        return _fit(weights, layout)


def load_matching(path: Path, layout: Layout, params: Array) -> Fit:
    """Load the matching parameters of a file into ``params``, shape (layout.size,); leave the rest unchanged.

    Raises:
        DamagedCheckpoint: The checkpoint is damaged; the content of ``params`` is then undefined.
        CheckpointError: No parameter matches, or the file cannot be read.
    """
    with opened(path, layout) as weights:
        fit, views = _fit(weights, layout), layout.views(params)
        weights.read_into({name: views[name] for name in fit.fitting})
        return fit


@contextmanager
def opened(path: Path, layout: Layout) -> Iterator[Weights]:
    """Open a file of parameters; names of shared parameters are replaced by the layout's names."""
    if is_torch_file(path):
        tensors = _named_by(layout, path, _load(path))

        def copy_into(views: Mapping[str, Array]) -> None:
            for name, view in views.items():
                view[...] = tensors[name].detach().double().numpy()

        yield Weights(path, {name: tuple(tensor.shape) for name, tensor in tensors.items()}, copy_into)
        return
    with Checkpoint(path) as checkpoint:
        names = [name for name in checkpoint.datasets if name.startswith(_PARAMS)]
        shapes = {name.removeprefix(_PARAMS): checkpoint.datasets[name].shape for name in names}
        yield Weights(
            path, shapes, lambda views: checkpoint.read_into({f"{_PARAMS}{name}": v for name, v in views.items()})
        )


def _fit(weights: Weights, layout: Layout) -> Fit:
    fit = compare(weights.shapes, {entry.name: entry.shape for entry in layout.entries})
    if not fit.fitting:
        reshaped = f": {fit.first_differences()}" if fit.reshaped else ""
        ours = numbered("parameter", (entry.name for entry in layout.entries))
        raise CheckpointError(
            f"--init-from {weights.path}: no parameter matches the model{reshaped}; the model has {ours}; the file has "
            f"{numbered('parameter', weights.shapes)}"
        )
    return fit


def _load(path: Path) -> dict[str, Any]:
    """Return a file's floating-point tensors by name, without running any code that the file contains.

    Raises:
        CheckpointError: The file cannot be read, or has no such tensors.
    """
    torch = _library("torch", path)
    try:
        if path.suffix == ".safetensors":
            content = _library("safetensors.torch", path).load_file(path)
        else:
            content = torch.load(path, map_location="cpu", weights_only=True)
    except UnpicklingError as error:
        found = re.search(r"GLOBAL (\S+)", str(error))
        what = f"contains {found[1]}" if found else "was not written by torch.save, or contains more than tensors"
        raise CheckpointError(
            f"--init-from {path} {what}, and only tensors are read: write it with torch.save(module.state_dict(), path)"
        ) from error
    except Exception as error:
        reason = f"{type(error).__name__}: {one_line(error)[:200]}"
        if not isinstance(error, OSError):
            reason = f"it is damaged, or was not written by torch.save or safetensors ({reason})"
        raise CheckpointError(f"--init-from {path} cannot be read: {reason}") from error

    def tensors_in(value: object) -> dict[str, Any]:
        named = value.items() if isinstance(value, Mapping) else ()
        found = {str(name): each for name, each in named if torch.is_tensor(each)}
        for name, each in found.items():
            if each.layout != torch.strided or each.is_meta or each.is_quantized:
                raise CheckpointError(f"--init-from {path}: {name} is sparse, quantized or without values")
        return {name: each for name, each in found.items() if each.is_floating_point()}

    inner = {key: value for key, value in content.items() if tensors_in(value)} if isinstance(content, Mapping) else {}
    is_flat = any(tensor.ndim for tensor in tensors_in(content).values())  # others are values such as the best loss
    chosen = [key for key in _STATE_KEYS if key in inner][:1] or ([] if is_flat else [*inner])
    if len(chosen) > 1:
        raise CheckpointError(
            f"--init-from {path} contains several, {numbered('state_dict', chosen)}: save one of them"
        )
    if not (tensors := tensors_in(inner[chosen[0]] if chosen else content)):
        raise CheckpointError(
            f"--init-from {path} contains no named floating-point tensors: it must be a module's state_dict"
        )
    return tensors


def _named_by(layout: Layout, path: Path, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tensors of a file by the layout's names; names that the model does not have stay.

    Raises:
        CheckpointError: Two tensors have the same name in the model.
    """
    known = {entry.name for entry in layout.entries} | set(layout.aliases)
    given = dict[str, str]()  # the names in the file, by those in the model
    for name in tensors:
        plain = name.replace(_COMPILED, "")
        while plain not in known and plain.startswith(_WRAPPED):  # the model may have a submodule ``module``, too
            plain = plain.partition(".")[2]
        plain = plain if plain in known else name
        if plain in given:
            raise CheckpointError(f"--init-from {path}: {given[plain]} and {name} are both {plain} of the model")
        given[plain] = name
    return {layout.aliases.get(plain, plain): tensors[name] for plain, name in given.items()}


def _library(name: str, path: Path) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        extra = "torch" if name == "torch" else "export"
        raise CheckpointError(
            f"--init-from {path} requires {name.partition('.')[0]}; run pip install 'mpitrain[{extra}]'"
        ) from error
