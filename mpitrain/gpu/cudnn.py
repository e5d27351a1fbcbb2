"""Convolutions with cuDNN, through graphs of its frontend; imported only if the frontend is installed.

Images have the memory layout (batch, height, width, channels) and filters (filters, height, width, channels). cuDNN
orders axes as (batch, channels, height, width); strides describe the layout.
"""

from __future__ import annotations

import logging
from typing import Any

import cudnn
import cupy
import ml_dtypes
import numpy as np

from ..core.device import ConvolutionShape
from ..core.layout import Array, Shape

_log = logging.getLogger(__name__)
_WORKSPACE = 1 << 30  # bytes; algorithms that need more gain little
_KINDS = {
    np.dtype(np.float32): cudnn.data_type.FLOAT,
    np.dtype(np.float16): cudnn.data_type.HALF,
    np.dtype(ml_dtypes.bfloat16): cudnn.data_type.BFLOAT16,
}
_NOTES = cudnn.numerical_note
_DECLINES = (cudnn.cudnnGraphNotSupportedError, NotImplementedError, RuntimeError)


class ConvolutionPlans:
    """Plans of convolutions on the current GPU, cached by shape.

    A plan always sums in the same order.

    Args:
        tf32: Whether float32 may be rounded to TF32 for tensor cores.
    """

    def __init__(self, tf32: bool) -> None:
        self._handle = cudnn.create_handle()
        self._tf32 = tf32
        self._plans: dict[Any, ConvolutionPlan | None] = {}

    def plan(self, shape: ConvolutionShape, dtype: np.dtype[Any], needs_dx: bool) -> ConvolutionPlan | None:
        """Return the plan for images of a type, or None if cuDNN has none."""
        if dtype not in _KINDS:
            return None
        key = shape, dtype, needs_dx
        if key not in self._plans:
            self._plans[key] = self._made(shape, dtype, needs_dx)
        return self._plans[key]

    def _made(self, shape: ConvolutionShape, dtype: np.dtype[Any], needs_dx: bool) -> ConvolutionPlan | None:
        try:
            return ConvolutionPlan(self, shape, dtype, needs_dx)
        except _DECLINES as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            _log.info(
                "cuDNN has no plan for filters %s on images %s; using matrix products instead: %s",
                shape.filters,
                shape.images,
                reason,
            )
            return None

    def graph(self, kind: Any) -> Any:
        """Return an empty graph of tensors of ``kind``."""
        real = cudnn.data_type.FLOAT
        return cudnn.pygraph(
            io_data_type=kind, intermediate_data_type=real, compute_data_type=real, handle=self._handle
        )

    def build(self, graph: Any, kind: Any) -> None:
        """Choose an execution plan for a graph.

        Raises:
            Exception: One of ``_DECLINES``: cuDNN supports no plan.
        """
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        unwanted = [_NOTES.NONDETERMINISTIC]
        if kind == cudnn.data_type.FLOAT:
            unwanted.append(_NOTES.DOWN_CONVERT_INPUTS)
            unwanted += [] if self._tf32 else [_NOTES.TENSOR_CORE]
        graph.deselect_numeric_notes(unwanted)
        graph.deselect_workspace_greater_than(_WORKSPACE)
        graph.check_support()
        graph.build_plans()

    def execute(self, graph: Any, operands: dict[Any, Array]) -> None:
        """Run a built graph on CuPy's current stream."""
        cudnn.set_stream(handle=self._handle, stream=cupy.cuda.get_current_stream().ptr)
        workspace = cupy.empty(max(1, graph.get_workspace_size()), np.uint8)
        pointers = {tensor: array.data.ptr for tensor, array in operands.items()}  # type: ignore[attr-defined]
        graph.execute(pointers, workspace.data.ptr, handle=self._handle)


class ConvolutionPlan:
    """A convolution of one shape and type: forward, and the gradients of images and filters.

    Attributes:
        grad_dtype: Data type of the filters' gradient.

    Raises:
        Exception: One of ``_DECLINES``: cuDNN does not support one of the operations.
    """

    def __init__(self, owner: ConvolutionPlans, shape: ConvolutionShape, dtype: np.dtype[Any], needs_dx: bool) -> None:
        self._owner, self._shape, self._kind = owner, shape, _KINDS[dtype]
        self._forward = self._make("conv_fprop", ("image", "weight"), self._kind)
        self._data = self._make("conv_dgrad", ("loss", "filter"), self._kind) if needs_dx else None
        self.grad_dtype, self._filters = self._of_filters(dtype)

    def forward(self, x: Array, filters: Array, y: Array) -> None:
        """Compute ``y``."""
        self._run(self._forward, x, filters, y)

    def data_gradient(self, dy: Array, filters: Array, dx: Array) -> None:
        """Compute ``dx``."""
        self._run(self._data, dy, filters, dx)

    def filter_gradient(self, x: Array, dy: Array, grad: Array) -> None:
        """Compute ``grad``, with the shape of the filters and type ``grad_dtype``."""
        self._run(self._filters, x, dy, grad)

    def _of_filters(self, dtype: np.dtype[Any]) -> tuple[np.dtype[Any], Any]:
        """Return dtype and graph of the filters' gradient: float32 if supported, else the type of the images."""
        ports = "image", "loss"
        try:
            return np.dtype(np.float32), self._make("conv_wgrad", ports, cudnn.data_type.FLOAT)
        except _DECLINES:
            if self._kind == cudnn.data_type.FLOAT:
                raise
            return dtype, self._make("conv_wgrad", ports, self._kind)

    def _make(self, operation: str, ports: tuple[str, str], kind: Any) -> Any:
        """Return a graph and its tensors: two inputs, and one output of ``kind``."""
        shape, graph = self._shape, self._owner.graph(self._kind)
        shapes = {"image": shape.images, "weight": shape.filters, "filter": shape.filters, "loss": shape.outputs}
        written = {"conv_fprop": shape.outputs, "conv_dgrad": shape.images, "conv_wgrad": shape.filters}[operation]
        read = {name: graph.tensor(name=name, data_type=self._kind, **_laid(shapes[name])) for name in ports}
        out = getattr(graph, operation)(
            **read,
            pre_padding=[before for before, _ in shape.padding],
            post_padding=[after for _, after in shape.padding],
            stride=list(shape.stride),
            dilation=[1, 1],
        )
        laid = _laid(written)
        out.set_output(True).set_data_type(kind).set_dim(laid["dim"]).set_stride(laid["stride"])
        self._owner.build(graph, self._kind)
        return graph, (*read.values(), out)

    def _run(self, made: Any, *arrays: Array) -> None:
        graph, tensors = made
        self._owner.execute(graph, dict(zip(tensors, arrays, strict=True)))


def _laid(shape: Shape) -> dict[str, list[int]]:
    """Return cuDNN's dimensions and strides of an array of shape (count, height, width, channels)."""
    count, height, width, channels = shape
    return {
        "dim": [count, channels, height, width],
        "stride": [height * width * channels, 1, width * channels, channels],
    }
