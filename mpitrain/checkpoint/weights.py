"""Parameters for ``--init-from``: from a checkpoint, or from a file that PyTorch or safetensors has written."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from ..core.layout import Array, Layout, Shape
from ..core.words import one_line
from ..errors import CheckpointError
from .reader import Checkpoint
from .state import Fit, compare

SUFFIXES = (".safetensors", ".pt", ".pth", ".bin")
_PARAMS = "params/"
_WRAPPED, _COMPILED = "module.", "_orig_mod."  # prefixes of names in files that were saved from a wrapped module


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
    if path.suffix in SUFFIXES:
        plain = _plain_name(layout)
        tensors = {plain(name): tensor for name, tensor in _load(path).items()}

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
        raise CheckpointError(f"--init-from {weights.path}: no parameter matches the model: {fit.first_differences()}")
    return fit


def _load(path: Path) -> dict[str, Any]:
    """Return a file's floating-point tensors by name, without running any code that the file contains.

    Raises:
        CheckpointError: The file cannot be read, or has no such tensors.
    """
    if not path.is_file():
        raise CheckpointError(f"--init-from {path}: no such file")
    torch = _library("torch", path)
    try:
        if path.suffix == ".safetensors":
            content = _library("safetensors.torch", path).load_file(path)
        else:
            content = torch.load(path, map_location="cpu", weights_only=True)
    except UnpicklingError as error:
        raise CheckpointError(
            f"--init-from {path} contains more than tensors, or was not written by torch.save: write it with "
            "torch.save(module.state_dict(), path)"
        ) from error
    except Exception as error:
        reason = one_line(error)[:200]
        raise CheckpointError(f"--init-from {path} cannot be read: {type(error).__name__}: {reason}") from error
    for key in ("state_dict", "model_state_dict", "model"):
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    named = content.items() if isinstance(content, Mapping) else ()
    tensors = {str(n): value for n, value in named if torch.is_tensor(value) and value.is_floating_point()}
    if not tensors:
        raise CheckpointError(
            f"--init-from {path} contains no named floating-point tensors: it must be a module's state_dict"
        )
    return tensors


def _plain_name(layout: Layout) -> Callable[[str], str]:
    """Return a function that returns the layout's name for a name in a file."""
    known = {entry.name for entry in layout.entries} | set(layout.aliases)

    def plain(name: str) -> str:
        name = name.replace(_COMPILED, "")
        if name not in known:  # the model itself may have a submodule named ``module``
            name = name.removeprefix(_WRAPPED)
        return layout.aliases.get(name, name)

    return plain


def _library(name: str, path: Path) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        extra = "torch" if name == "torch" else "export"
        raise CheckpointError(
            f"--init-from {path} requires {name.partition('.')[0]}; run pip install 'mpitrain[{extra}]'"
        ) from error
