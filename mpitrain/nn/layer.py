"""The layer interface: build for a shape, bind to views of flat vectors, run forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..core.device import CPU, Device
from ..core.layout import Array, Kind, Layout, Shape

#: A function of a random generator and a shape that returns initial values of that shape.
Initializer = Callable[[np.random.Generator, Shape], Array]
SumOverWorkers = Callable[[Array], None]


class Declared(NamedTuple):
    """A parameter or state declared by a layer."""

    shape: Shape
    init: Initializer
    kind: Kind


@dataclass
class Context:
    """Information about the current step for layers.

    Attributes:
        training: False during validation: Dropout is disabled, BatchNorm uses its running statistics.
        position: Position of the batch's first example in the endless stream of examples. Random numbers depend on
            seed, layer and position. An example therefore gets the same Dropout mask on any rank, and a resumed run
            needs no random state. On a GPU a device array of shape (1,), uint64.
        seed: The run's seed.
        weight: Weight of one example in the global batch: 1 / its number of examples.
        sum_over_workers: Sums a small array over all workers, in place. Collective over the workers. None if there is
            only one worker.
    """

    training: bool = False
    position: Any = 0
    seed: int = 0
    weight: float = 1.0
    sum_over_workers: SumOverWorkers | None = None


class Layer:
    """A differentiable function with named parameters.

    Subclasses override ``build``, ``forward`` and ``backward``. A parameter declared in ``build`` as ``weight`` is
    available as ``self.weight``, a view of the parameters. Its gradient is ``self.weight_grad``, a view of the
    gradients, which ``backward`` *assigns* (never adds to). For a state (``declare(..., kind="state")``) ``forward``
    assigns to ``self.<name>_grad`` the increment of this batch, weighted by ``batch * ctx.weight``. The increments of
    all workers are summed and added to the state.

    Arrays returned by ``forward`` and ``backward`` may be buffers that the next call overwrites. A layer may overwrite
    the ``dy`` it is given, but not ``x``.

    A subclass may set ``supports_amp = True``. Then ``x`` and ``dy`` may be 16-bit or of the parameters' type; convert
    them with ``cast_input``, and return arrays created by ``activations``.

    A subclass that takes integers, such as indices, may set ``integer_inputs = True``. As the first layer of a model,
    it gets integer examples in their stored type and without the split's ``scale``. Other layers get integer examples
    converted to the parameters' type.

    A subclass whose ``forward`` and ``backward`` enqueue the same GPU work in every training step, except for values in
    arrays, may set ``static = True``. A model with only static layers is recorded as CUDA graphs and replayed. Layers
    of ``mpitrain.nn`` are static.

    Attributes:
        device: Device of the layer's arrays.
        supports_amp: Whether the layer accepts and returns 16-bit activations and gradients.
        integer_inputs: Whether integer examples stay integers if this is the first layer.
        compute_dtype: Type of returned activations; None for the parameters' type.
        output_shape: Shape of one output example; set for a whole model when it is laid out.
        needs_dx: Set to False by the model if no earlier layer has parameters.
        announces_children: Whether ``backward`` calls ``after_backward(i)``, unless None, as soon as the gradients of
            child i and all later children are final. These can then be averaged while earlier children still compute.
        before_forward: Called by ``Sequential.forward`` with i before it uses the parameters of child i, unless None.
    """

    device: Device = CPU
    supports_amp = False
    integer_inputs = False
    compute_dtype: np.dtype[Any] | None = None
    output_shape: Shape = ()
    needs_dx = True
    announces_children = False
    after_backward: Callable[[int], None] | None = None
    before_forward: Callable[[int], None] | None = None

    def __init__(self, name: str | None = None) -> None:
        self.name = name
        self.declared: dict[str, Declared] = {}
        self.dtype: np.dtype[Any] = np.dtype(np.float32)
        self.index = 0  # index of the layer in the model; makes random numbers differ between layers
        self._buffers: dict[tuple[str, Shape], Array] = {}

    def __init_subclass__(cls) -> None:
        """Reset ``supports_amp`` in classes that override a method; they must declare support themselves."""
        if not {"forward", "backward"}.isdisjoint(own := vars(cls)):
            cls.supports_amp = bool(own.get("supports_amp", False))

    def build(self, shape: Shape) -> Shape:
        """Declare parameters for inputs of ``shape`` (of one example); return the output's shape.

        Raises:
            JobError: The layer does not accept this shape; the message names the accepted shapes.
        """
        return shape

    def forward(self, x: Array, ctx: Context) -> Array:
        """Return the outputs of a batch ``x``, shape ``(batch, *shape)``."""
        raise NotImplementedError

    def backward(self, dy: Array) -> Array | None:
        """Compute the parameters' gradients and return the gradient of ``x``; None if ``needs_dx`` is False.

        ``dy`` is the loss's gradient with respect to the result of the last ``forward``.
        """
        raise NotImplementedError

    @property
    def ops(self) -> Any:
        """The operations of this layer's device, ``core.ops`` or ``gpu.ops``."""
        return self.device.ops

    def dispatch(self, kernel: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that runs a user's own kernel for CPU arrays on arrays of this layer's device.

        On a GPU it copies the arrays to the CPU and back, which is slow; code that uses ``device.xp`` instead of NumPy
        runs on both.
        """
        return self.device.dispatch(kernel)

    def children(self) -> list[tuple[str, Layer]]:
        """Return the named layers inside this layer, in the order in which they run forward."""
        return []

    def declare(self, name: str, shape: Shape, init: Initializer, kind: Kind = "param") -> None:
        """Declare a parameter or a state; call this in ``build``."""
        self.declared[name] = Declared(shape, init, kind)

    def cast_input(self, array: Array, tag: str) -> Array:
        """Return activations or their gradients, C-contiguous, in the layer's compute type."""
        array = self.device.xp.ascontiguousarray(array)
        return (
            array
            if self.compute_dtype is None or array.dtype == self.compute_dtype
            else self._cast(array, tag, self.compute_dtype)
        )

    def cast_output(self, array: Array, tag: str) -> Array:
        """Return activations or their gradients in the parameters' type; integers unchanged."""
        if self.compute_dtype is None or array.dtype == self.dtype or array.dtype.kind in "iu":
            return array
        return self._cast(self.device.xp.ascontiguousarray(array), tag, self.dtype)

    def cast_param(self, parameter: Array, tag: str) -> Array:
        """Return a parameter rounded to the compute type, for products. Call it in ``forward``."""
        return parameter if self.compute_dtype is None else self._cast(parameter, tag, self.compute_dtype)

    def activations(self, tag: str, shape: Shape, fill: float | None = None) -> Array:
        """Return a ``buffer`` in the layer's compute type."""
        return self.buffer(tag, shape, self.compute_dtype, fill)

    def _cast(self, array: Array, tag: str, dtype: Any) -> Array:
        out = self.buffer(tag, array.shape, dtype)
        self.ops.cast(array, out)
        return out

    @property
    def buffer_bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def buffer(self, tag: str, shape: Shape, dtype: Any = None, fill: float | None = None) -> Array:
        """Return memory of this layer, the same at every call with this tag and shape.

        New arrays would cost page faults at every step. The first call sets the elements to ``fill`` unless it is None.
        """
        buffer = self._buffers.get((tag, shape))
        if buffer is None:
            buffer = self._buffers[tag, shape] = self.device.empty(shape, self.dtype if dtype is None else dtype)
            if fill is not None:
                buffer[...] = fill
        return buffer


def walk(layer: Layer, prefix: str = "") -> Iterator[tuple[str, Layer]]:
    """Yield every layer with its dotted path, in the order in which they run forward."""
    yield prefix, layer
    for name, child in layer.children():
        yield from walk(child, f"{prefix}.{name}" if prefix else name)


def layout_of(model: Layer, shape: Shape, dtype: Any) -> Layout:
    """Build ``model`` for examples of ``shape`` and lay out its parameters.

    Raises:
        JobError: A layer does not accept its input shape.
    """
    for index, (_, layer) in enumerate(walk(model)):
        layer.dtype = np.dtype(dtype)
        layer.index = index
        layer._buffers.clear()  # a buffer's ``fill`` depends on the shape of examples
    model.output_shape = model.build(shape)
    return Layout.pack(
        (f"{path}.{name}" if path else name, spec.shape, spec.kind)
        for path, layer in walk(model)
        for name, spec in layer.declared.items()
    )


def to_device(model: Layer, device: Device) -> None:
    """Move a model to ``device``; call it before the first forward pass.

    If activations are 16-bit, layers without ``supports_amp``, and all layers inside them, get activations of the
    parameters' type.
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
    """Set ``params`` to initial values, which depend only on the seed and each parameter's name."""
    views = layout.views(params)
    params[...] = 0
    for path, layer in walk(model):
        for name, spec in layer.declared.items():
            full = f"{path}.{name}" if path else name
            rng = np.random.default_rng([seed, *full.encode()])
            views[full][...] = spec.init(rng, spec.shape)
