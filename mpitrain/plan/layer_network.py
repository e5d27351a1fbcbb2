"""A model of layers with its loss, before training: a ``plan.network.Network``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..core.layout import Array, Layout
from ..data.batch import CollatedBatch
from ..data.split import DatasetSplit, Split
from ..errors import JobError
from ..nn.layer import Layer, initialize, layout_of, walk
from ..nn.loss import Loss
from ..nn.normalize import BatchNorm


class LayerNetwork:
    """Layers and a loss; see ``plan.network.Network`` for the methods."""

    frozen = ()
    has_own_loop = False
    counts_labels = True
    writes_grads_once = True

    def __init__(self, model: Layer, loss: Loss) -> None:
        self.model, self.loss = model, loss

    def as_split(self, dataset: object) -> object:
        is_dataset = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
        if is_dataset and not isinstance(dataset, (Split, np.ndarray, tuple, list, dict, str)):
            dataset = DatasetSplit(dataset)
        return dataset.as_arrays() if isinstance(dataset, DatasetSplit) else dataset

    def rule_of(self, optimizer: Any) -> Any:
        return optimizer

    def lay_out(self, train: Split, dtype: Any) -> Layout:
        layout, self._shape = layout_of(self.model, train.shape, dtype), train.shape
        self.loss.check(self.model.output_shape, train.classes)
        return layout

    def check_validation(self, validation: Split, dtype: Any) -> None:
        if validation.shape != self._shape:
            raise JobError(
                f"an example of {validation.source} has the shape {validation.shape}, but a training example "
                f"{self._shape}: apply the same transforms"
            )

    @property
    def classes(self) -> int | None:
        return self.loss.classes(self.model.output_shape)

    def starts(self, layout: Layout) -> list[int]:
        """Return each child's first parameter element; for a child without parameters, that of the next child."""
        begin = {entry.name: entry.start for entry in layout.entries if entry.kind == "param"}
        start, layer_starts = layout.n_trained, []
        for name, child in reversed(self.model.children()):
            for path, layer in walk(child, name):
                start = min([start, *(begin[f"{path}.{own}"] for own in layer.declared if f"{path}.{own}" in begin)])
            layer_starts.append(start)
        return layer_starts[::-1]

    def initialize(self, layout: Layout, params: Array, seed: int) -> None:
        initialize(self.model, layout, params, seed)

    def takes_integers(self, split: Split) -> bool:
        return split.has_integers and self.model.integer_inputs

    def shown(self, batch: CollatedBatch, dtype: Any) -> Any:
        return batch.examples

    def joined(self, parts: Sequence[Array]) -> Array:
        return np.concatenate(parts)

    @property
    def synchronizes_statistics(self) -> bool:
        return any(isinstance(layer, BatchNorm) and layer.sync for _, layer in walk(self.model))

    def components(self) -> list[tuple[str, str, str]]:
        return [
            (path or "model", type(layer).__name__, _shapes(layer))
            for path, layer in walk(self.model)
            if not layer.children()
        ]

    def facts(self) -> dict[str, object]:
        return {"loss": type(self.loss).__name__}


def _shapes(layer: Layer) -> str:
    return ", ".join(f"{name} {'x'.join(map(str, spec.shape))}" for name, spec in layer.declared.items())
