"""Containers of layers: sequential, and residual."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import numpy as np

from ..core.layout import Array, Shape
from ..errors import JobError
from .activation import NO_ACTIVATION, Activation, ReLU
from .biased import Biased
from .conv import Conv2D
from .dense import Dense
from .layer import Context, Layer, walk
from .normalize import BatchNorm, LayerNorm
from .pool import MaxPool
from .shape import Flatten, Reshape

# Layers whose backward does not read the output of forward, so that the next layer may overwrite it.
FORGETS_OUTPUT = (Dense, Conv2D, BatchNorm, LayerNorm)
# These exact classes only: user-defined subclasses may behave differently.
_BIASED = (Dense, Conv2D)


class Sequential(Layer):
    """Layers that run one after the other.

    A child without a name gets its class name and its index among the children of that class, such as ``dense2``.

    Raises:
        JobError: There are no layers, an argument is not a layer, or a layer or a name occurs twice.
    """

    supports_amp = True
    announces_children = True
    # A model's input needs no gradient; an enclosing container overrides this.
    needs_dx = False

    def __init__(self, *layers: Layer, name: str | None = None) -> None:
        super().__init__(name)
        _check_layers(self, layers)
        self.layers = layers
        self.integer_inputs = _takes_integers(layers)
        self._names = _names_of(layers)
        self._first = 0  # backward stops at this child; earlier children need no gradient

    def children(self) -> list[tuple[str, Layer]]:
        return list(zip(self._names, self.layers, strict=True))

    def build(self, shape: Shape) -> Shape:
        needs_dx = self.needs_dx
        self._first = 0 if needs_dx else len(self.layers)
        _fuse_activations(self.layers)
        for i, (name, layer) in enumerate(self.children()):
            layer.needs_dx = needs_dx
            if isinstance(layer, ReLU):
                layer.in_place = i > 0 and isinstance(self.layers[i - 1], FORGETS_OUTPUT)
            try:
                shape = layer.build(shape)
            except JobError as error:
                raise JobError(f"{name}: {error}") from None
            if not needs_dx and _has_params(layer):
                needs_dx, self._first = True, i
        return shape

    def forward(self, x: Array, ctx: Context) -> Array:
        for i, layer in enumerate(self.layers):
            if self.before_forward is not None:
                self.before_forward(i)
            x = layer.forward(x if layer.supports_amp else self.cast_output(x, f"x{i}"), ctx)
        return x

    def backward(self, dy: Array) -> Array | None:
        gradient: Any = dy
        for i in range(len(self.layers) - 1, self._first - 1, -1):
            layer = self.layers[i]
            gradient = layer.backward(gradient if layer.supports_amp else self.cast_output(gradient, f"dy{i}"))
            if self.after_backward is not None:
                self.after_backward(i)
        return gradient if self.needs_dx else None


class Residual(Sequential):
    """``x`` plus the output of layers that run one after the other and keep the shape.

    He, Zhang, Ren and Sun, Deep residual learning for image recognition, CVPR 2016, equation 1.
    """

    supports_amp = True

    def __init__(self, *layers: Layer, name: str | None = None) -> None:
        super().__init__(*layers, name=name)
        self.integer_inputs = False  # x is added to activations

    def build(self, shape: Shape) -> Shape:
        made = super().build(shape)
        if made != shape:
            raise JobError(
                f"Residual has input shape {shape} but its layers' output shape is {made}; shapes must match"
            )
        return shape

    def forward(self, x: Array, ctx: Context) -> Array:
        x = self.cast_input(x, "x")
        made = self.cast_input(super().forward(x, ctx), "made")
        y = self.activations("y", x.shape)
        self.ops.add(x, made, y)
        return y

    def backward(self, dy: Array) -> Array | None:
        dy = self.cast_input(dy, "dy")
        around = self.activations("dx", dy.shape)
        around[...] = dy  # copied before the layers overwrite it
        dx = super().backward(dy)
        if dx is None:
            return None
        self.ops.add(around, self.cast_input(dx, "slope"), around)
        return around


def _fuse_activations(layers: tuple[Layer, ...]) -> None:
    """Let MaxPool apply the ReLU before it, and layers with a bias the activation after them.

    Undoes what another container has fused.
    """
    for layer in layers:
        if isinstance(layer, Biased | MaxPool):
            layer.activation = NO_ACTIVATION
        elif isinstance(layer, Activation):
            layer.is_fused = False
    for before, layer, after in zip((None, *layers), layers, (*layers[1:], None), strict=False):
        applier = _applier(before, layer, after)
        if isinstance(layer, Activation) and applier is not None:
            applier.activation, layer.is_fused = (layer.kind, layer.slope), True


def _applier(before: Layer | None, layer: Layer, after: Layer | None) -> Biased | MaxPool | None:
    """Return the neighbour that applies ``layer``, if this is an activation that a neighbour can apply."""
    if type(layer) is ReLU and type(after) is MaxPool:
        return after
    is_plain = isinstance(layer, Activation) and layer.only_applies_kind
    if is_plain and isinstance(before, Biased) and type(before) in _BIASED and before.has_bias:
        return before
    return None


def _takes_integers(layers: tuple[Layer, ...]) -> bool:
    """Return whether the first layer after reshapes takes integers."""
    return next((layer.integer_inputs for layer in layers if type(layer) not in (Flatten, Reshape)), False)


def input_dtype(model: Layer) -> np.dtype[Any]:
    """Return the type of the model's input: the type to which the first layer, after reshapes, converts it."""
    for _, layer in walk(model):
        if type(layer) in (Flatten, Reshape, Sequential, Residual):
            continue
        is_converted = layer.compute_dtype is not None and not layer.integer_inputs and not layer.children()
        return layer.compute_dtype if is_converted else layer.dtype  # type: ignore[return-value]
    return model.dtype


def _has_params(layer: Layer) -> bool:
    return any(spec.kind == "param" for _, part in walk(layer) for spec in part.declared.values())


def _check_layers(container: Layer, layers: tuple[Layer, ...]) -> None:
    kind = type(container).__name__
    if not layers:
        raise JobError(f"{kind} has no layers; add at least one")
    for layer in layers:
        if not isinstance(layer, Layer):
            raise JobError(f"{kind} got {layer!r}: arguments must be layers, such as nn.Dense(784, 10)")
    parts = Counter(id(part) for layer in layers for _, part in walk(layer))
    if max(parts.values()) > 1:
        raise JobError(f"{kind} contains the same layer object twice; create a new layer for each position")


def _names_of(layers: tuple[Layer, ...]) -> list[str]:
    counts: Counter[str] = Counter()
    names = []
    for layer in layers:
        kind = type(layer).__name__.lower()
        counts[kind] += 1  # named layers count too, so that naming one does not rename others
        names.append(f"{kind}{counts[kind]}" if layer.name is None else layer.name)
    for name, count in Counter(names).items():
        if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
            raise JobError(f"a layer is named {name!r}: must consist of letters, digits, '_' and '-'")
        if count > 1:
            raise JobError(f"{count} layers are named {name!r}; names must be unique")
    return names
