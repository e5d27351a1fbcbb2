"""Trees of numbers, texts and tensors, as ``state_dict`` returns, as values of a checkpoint; nothing is pickled."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core.extra_state import Value
from ..core.layout import Array
from ..errors import CheckpointError, JobError

_TREE = "tree"  # the name of the value with the structure, as JSON in UTF-8; arrays are named by number


def flatten(name: str, tree: Any) -> dict[str, Value]:
    """Return a tree as named values.

    Args:
        name: The owner of the state, for errors.

    Raises:
        JobError: The tree has a value that cannot be stored.
    """
    arrays: list[Array] = []

    def refused(kind: str) -> JobError:
        return JobError(
            f"the state of {name} has a value of type {kind}: must be dense tensors, numbers, strings, and lists, "
            "tuples and dicts of these"
        )

    def encoded(item: Any) -> Any:
        if item is None or type(item) in (bool, int, float, str):
            return item
        if isinstance(item, Tensor):
            host = item.detach().cpu()
            is_bfloat16 = host.dtype == torch.bfloat16
            try:
                arrays.append((host.float() if is_bfloat16 else host).numpy().copy())
            except (TypeError, RuntimeError) as error:
                raise refused(f"tensor of {host.dtype}, {host.layout}") from error
            return {"bfloat16" if is_bfloat16 else "tensor": len(arrays) - 1}
        if isinstance(item, np.ndarray) and item.dtype.kind in "biuf" and item.dtype.itemsize <= 8:
            arrays.append(item.copy())
            return {"array": len(arrays) - 1}
        if isinstance(item, (np.bool_, np.integer, np.floating)):
            return item.item()
        if isinstance(item, (list, tuple)):
            return {"tuple" if isinstance(item, tuple) else "list": [encoded(part) for part in item]}
        if isinstance(item, dict):
            kind = "counter" if isinstance(item, Counter) else "dict"
            return {kind: [[encoded(key), encoded(value)] for key, value in item.items()]}
        raise refused(type(item).__name__)

    text = json.dumps(encoded(tree))
    return {_TREE: np.frombuffer(text.encode(), np.uint8), **{str(i): array for i, array in enumerate(arrays)}}


def unflatten(values: Mapping[str, Value]) -> Any:
    """Return the tree that ``flatten`` has converted to these values.

    Raises:
        CheckpointError: The values do not describe a tree.
    """

    def decoded(item: Any) -> Any:
        if not isinstance(item, dict):
            return item
        ((kind, content),) = item.items()
        if kind in ("tensor", "bfloat16", "array"):
            array = np.array(values[str(content)])
            if kind == "array":
                return array
            return torch.from_numpy(array).to(torch.bfloat16 if kind == "bfloat16" else None)
        if kind in ("list", "tuple"):
            parts = [decoded(part) for part in content]
            return tuple(parts) if kind == "tuple" else parts
        made = {decoded(key): decoded(value) for key, value in content}
        return Counter(made) if kind == "counter" else made

    try:
        return decoded(json.loads(bytes(np.asarray(values[_TREE], np.uint8)).decode()))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            "the checkpoint's state of the script is malformed; use another checkpoint, or --init-from",
            on_all_ranks=True,
        ) from error
