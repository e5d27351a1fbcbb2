"""Layers made of layers: one after the other, and with a way around them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

from ..core.layout import Array, Shape
from ..errors import JobError
from .activation import GELU, Activation, LeakyReLU, ReLU, Sigmoid, Tanh
from .biased import Biased
from .conv import Conv2D
from .dense import Dense
from .layer import Context, Layer, walk
from .normalize import BatchNorm, LayerNorm

# Layers whose backward does not read what forward returned: what follows may overwrite it.
FORGETS_OUTPUT = (Dense, Conv2D, BatchNorm, LayerNorm)
# Not what a user derives from them, which may do anything.
_BIASED = (Dense, Conv2D)
_ACTIVATIONS = (ReLU, LeakyReLU, GELU, Tanh, Sigmoid)


class Sequential(Layer):
    """Layers that run one after the other.

    A child is called after its class and how many of that class came before it, as in ``dense2``, unless it
    has a name of its own.

    Attributes:
        after_backward: Called with i as soon as child i has assigned its gradients, from the last child to
            the first that has any: they can be averaged while earlier layers still compute.

    Raises:
        JobError: No layer, something that is no layer, the same layer or the same name twice.
    """

    supports_amp = True
    # A model's input needs no gradient; a container that holds this one sets it as its own case is.
    needs_dx = False

    def __init__(self, *layers: Layer, name: str | None = None) -> None:
        super().__init__(name)
        _check_layers(self, layers)
        self.layers = layers
        self.after_backward: Callable[[int], None] | None = None
        self._names = _names_of(layers)
        self._first = 0  # child at which backward stops: nothing before it needs a gradient

    def children(self) -> list[tuple[str, Layer]]:
        return list(zip(self._names, self.layers, strict=True))

    def build(self, shape: Shape) -> Shape:
        needs_dx = self.needs_dx
        self._first = 0 if needs_dx else len(self.layers)
        for i, (name, layer) in enumerate(self.children()):
            layer.needs_dx = needs_dx
            if isinstance(layer, ReLU):
                layer.in_place = i > 0 and isinstance(self.layers[i - 1], FORGETS_OUTPUT)
            if i > 0:
                _join(self.layers[i - 1], layer)
            try:
                shape = layer.build(shape)
            except JobError as error:
                raise JobError(f"{name}: {error}") from None
            if not needs_dx and _has_params(layer):
                needs_dx, self._first = True, i
        return shape

    def forward(self, x: Array, ctx: Context) -> Array:
        for i, layer in enumerate(self.layers):
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
    """``x`` plus what layers that run one after the other make of it; they must keep the shape.

    He, Zhang, Ren and Sun, Deep residual learning for image recognition, CVPR 2016, equation 1.
    """

    supports_amp = True

    def build(self, shape: Shape) -> Shape:
        made = super().build(shape)
        if made != shape:
            raise JobError(f"Residual adds its input {shape} to its layers' output {made}; make them the same shape")
        return shape

    def forward(self, x: Array, ctx: Context) -> Array:
        x = self.cast_input(x, "x")
        made = self.cast_input(super().forward(x, ctx), "made")
        return self._sum(x, made, self.activations("y", x.shape))

    def backward(self, dy: Array) -> Array | None:
        dy = self.cast_input(dy, "dy")
        around = self.activations("dx", dy.shape)
        around[...] = dy  # before the layers overwrite it
        dx = super().backward(dy)
        return None if dx is None else self._sum(around, self.cast_input(dx, "slope"), around)

    def _sum(self, a: Array, b: Array, out: Array) -> Array:
        if self.device.kernels is None:
            return self.device.xp.add(a, b, out=out)
        self.device.kernels.add(a, b, out)
        return out


def _join(before: Layer, layer: Layer) -> None:
    """Have an activation done by the layer before it, where that adds a bias."""
    if not (isinstance(before, Biased) and isinstance(layer, Activation)):
        return
    if type(before) in _BIASED and before.has_bias and type(layer) in _ACTIVATIONS:
        before.activation, layer.follows_bias = layer, True


def _has_params(layer: Layer) -> bool:
    return any(spec.kind == "param" for _, part in walk(layer) for spec in part.declared.values())


def _check_layers(container: Layer, layers: tuple[Layer, ...]) -> None:
    kind = type(container).__name__
    if not layers:
        raise JobError(f"{kind} has no layers; give at least one")
    for layer in layers:
        if not isinstance(layer, Layer):
            raise JobError(f"{kind} was given {layer!r}; give layers, such as nn.Dense(784, 10)")
    parts = Counter(id(part) for layer in layers for _, part in walk(layer))
    if max(parts.values()) > 1:
        raise JobError(f"{kind} holds one layer object twice; make a new layer for each place")


def _names_of(layers: tuple[Layer, ...]) -> list[str]:
    counts: Counter[str] = Counter()
    names = []
    for layer in layers:
        kind = type(layer).__name__.lower()
        counts[kind] += 1  # named ones count too, so that naming a layer renames no other
        names.append(f"{kind}{counts[kind]}" if layer.name is None else layer.name)
    for name, count in Counter(names).items():
        if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
            raise JobError(f"a layer is named {name!r}; use letters, digits, '_' and '-'")
        if count > 1:
            raise JobError(f"{count} layers are named {name!r}; give each a name of its own")
    return names
