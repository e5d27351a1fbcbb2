"""What a layer is: built for a shape, bound to views of flat vectors, run forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..core.device import CPU, Device
from ..core.layout import Array, Kind, Layout, Shape
from ..core.renamed import Renamed, class_option

Initializer = Callable[[np.random.Generator, Shape], Array]
SumOverWorkers = Callable[[Array], None]


class Declared(NamedTuple):
    """A parameter or a state that a layer asks for."""

    shape: Shape
    init: Initializer
    kind: Kind


@dataclass
class Context:
    """What a layer may know of the step that it takes part in.

    Attributes:
        training: False when validating: Dropout passes everything, BatchNorm uses its running statistics.
        position: Place of the batch's first example in the endless stream of examples. Random numbers are
            a function of seed, layer and position, so an example meets the same Dropout mask whichever
            rank computes it, and a resumed run needs no random state. On a GPU an array there, shape (1,), uint64.
        seed: The run's seed.
        weight: What one example counts for in the global batch: 1 / its number of examples.
        sum_over_workers: Sums a small array over all workers, in place; collective over the workers. None
            where there is one worker.
    """

    training: bool = False
    position: Any = 0
    seed: int = 0
    weight: float = 1.0
    sum_over_workers: SumOverWorkers | None = None


class Layer:
    """A differentiable function with named parameters.

    A subclass overrides ``build``, ``forward`` and ``backward``. What it declares in ``build`` as ``weight``
    is there afterwards as ``self.weight``, a view of the parameters, and ``self.weight_grad``, a view of
    the gradients that ``backward`` *assigns* (never adds to). For a state (``declare(..., kind="state")``)
    ``forward`` assigns to ``self.<name>_grad`` the increment that this batch contributes, weighted by
    ``batch * ctx.weight``: increments of all workers are summed and added to the state.

    Arrays returned by ``forward`` and ``backward`` may be buffers that the next call overwrites. A layer may
    overwrite the ``dy`` it is given, but not ``x``.

    A subclass may say ``supports_amp = True``: then ``x`` and ``dy`` can be of 16 bits or of the parameters' type, ``cast_input``
    gives them in the one that is right, and it returns arrays that ``activations`` makes.

    A subclass whose ``forward`` and ``backward`` ask the same of a GPU in every training step, but for values in
    arrays, may say ``static = True``: a model all of whose layers do is recorded as CUDA graphs and replayed. Layers of
    ``mpitrain.nn`` are static.
    """

    device: Device = CPU  # where its arrays are; see ``place``
    supports_amp = (
        False  # whether it may be given activations and gradients of 16 bits, and returns them; see ``place``
    )
    compute_dtype: np.dtype[Any] | None = None  # the type that it returns them in, where that is not the parameters'
    output_shape: Shape = ()  # of one example; of a whole model, once it is laid out
    needs_dx = True  # set False by the model where nothing before this layer has parameters

    def __init__(self, name: str | None = None) -> None:
        self.name = name
        self.declared: dict[str, Declared] = {}
        self.dtype: np.dtype[Any] = np.dtype(np.float32)
        self.index = 0  # place in the model: keeps the random numbers of two layers apart
        self._buffers: dict[tuple[str, Shape], Array] = {}

    def __init_subclass__(cls) -> None:
        """A class that overrides a method of a layer that supports AMP has to declare support itself."""
        if not {"forward", "backward", "supports_amp", "mixed"}.isdisjoint(vars(cls)):
            cls.supports_amp = class_option(cls, "supports_amp", old="mixed")

    def build(self, shape: Shape) -> Shape:
        """Declare parameters for inputs of ``shape`` (of one example); return the output's shape.

        Raises:
            JobError: The layer cannot take inputs of this shape; the message says which it can.
        """
        return shape

    def forward(self, x: Array, ctx: Context) -> Array:
        """Outputs for a batch ``x``, shape (batch, *shape)."""
        raise NotImplementedError

    def backward(self, dy: Array) -> Array | None:
        """Assign the parameters' gradients and return that of ``x``; None where ``needs_dx`` is False.

        ``dy`` is the loss's gradient with respect to what the last ``forward`` returned.
        """
        raise NotImplementedError

    def dispatch(self, kernel: Callable[..., Any]) -> Callable[..., Any]:
        """The form of an element kernel that runs where this layer's arrays are."""
        return self.device.dispatch(kernel)

    def children(self) -> list[tuple[str, Layer]]:
        """Named layers inside this one, in the order in which they run forward."""
        return []

    def declare(self, name: str, shape: Shape, init: Initializer, kind: Kind = "param") -> None:
        """Ask for a parameter; to be called in ``build``."""
        self.declared[name] = Declared(shape, init, kind)

    def cast_input(self, array: Array, tag: str) -> Array:
        """Activations or their gradients, C-contiguous, in the type that this layer's have."""
        array = self.device.xp.ascontiguousarray(array)
        return (
            array
            if self.compute_dtype is None or array.dtype == self.compute_dtype
            else self._cast(array, tag, self.compute_dtype)
        )

    def cast_output(self, array: Array, tag: str) -> Array:
        """Activations or their gradients in the type of parameters."""
        if self.compute_dtype is None or array.dtype == self.dtype:
            return array
        return self._cast(self.device.xp.ascontiguousarray(array), tag, self.dtype)

    def cast_param(self, parameter: Array, tag: str) -> Array:
        """A parameter as it takes part in products: rounded to the type of activations. To be called in ``forward``."""
        return parameter if self.compute_dtype is None else self._cast(parameter, tag, self.compute_dtype)

    def activations(self, tag: str, shape: Shape) -> Array:
        """A ``buffer`` of the type that this layer's activations have."""
        return self.buffer(tag, shape, self.compute_dtype)

    form, taken, widened = Renamed("dispatch"), Renamed("cast_input"), Renamed("cast_output")
    operand, narrow, mixed = Renamed("cast_param"), Renamed("compute_dtype"), Renamed("supports_amp")

    def _cast(self, array: Array, tag: str, dtype: Any) -> Array:
        out = self.buffer(tag, array.shape, dtype)
        self.device.kernels.cast(array, out)
        return out

    @property
    def buffer_bytes(self) -> int:
        """Bytes that ``buffer`` has given."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def buffer(self, tag: str, shape: Shape, dtype: Any = None) -> Array:
        """Uninitialized memory kept for this layer, the same at every call with this tag and shape.

        Fresh arrays of this size would be mapped and page-faulted anew at every step.
        """
        found = self._buffers.get((tag, shape))
        if found is None:
            found = self._buffers[tag, shape] = self.device.empty(shape, self.dtype if dtype is None else dtype)
        return found


def walk(layer: Layer, prefix: str = "") -> Iterator[tuple[str, Layer]]:
    """Every layer with its dotted path, in the order in which they run forward."""
    yield prefix, layer
    for name, child in layer.children():
        yield from walk(child, f"{prefix}.{name}" if prefix else name)


def layout_of(model: Layer, shape: Shape, dtype: Any) -> Layout:
    """Build ``model`` for examples of ``shape`` and lay out its parameters.

    Raises:
        JobError: A layer cannot take the shape that comes to it.
    """
    for index, (_, layer) in enumerate(walk(model)):
        layer.dtype = np.dtype(dtype)
        layer.index = index
    model.output_shape = model.build(shape)
    return Layout.pack(
        (f"{path}.{name}" if path else name, spec.shape, spec.kind)
        for path, layer in walk(model)
        for name, spec in layer.declared.items()
    )


def place(model: Layer, device: Device) -> None:
    """Have a model compute on ``device``; before its first forward pass.

    Where activations have 16 bits, layers that are not ``supports_amp`` are given those of the parameters' type all the same,
    and so are all layers within them.
    """
    _place(model, device, device.compute_dtype)


def _place(layer: Layer, device: Device, compute_dtype: np.dtype[Any] | None) -> None:
    layer.device = device
    layer.compute_dtype = compute_dtype if layer.supports_amp else None
    for _, child in layer.children():
        _place(child, device, layer.compute_dtype)


def bind(model: Layer, layout: Layout, params: Array, grads: Array) -> None:
    """Make the layers' parameters and gradients views of two flat vectors, shape (layout.size,)."""
    param_views, grad_views = layout.views(params), layout.views(grads)
    for path, layer in walk(model):
        for name in layer.declared:
            full = f"{path}.{name}" if path else name
            setattr(layer, name, param_views[full])
            setattr(layer, f"{name}_grad", grad_views[full])


def initialize(model: Layer, layout: Layout, params: Array, seed: int) -> None:
    """Fill ``params`` with initial values: a function of the seed and each parameter's name alone."""
    views = layout.views(params)
    params[...] = 0
    for path, layer in walk(model):
        for name, spec in layer.declared.items():
            full = f"{path}.{name}" if path else name
            rng = np.random.default_rng([seed, *full.encode()])
            views[full][...] = spec.init(rng, spec.shape)
