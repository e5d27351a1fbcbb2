"""Convolutions with cuDNN, through graphs of its frontend; imported only if the frontend is installed.

Images have the memory layout (batch, height, width, channels) and filters (filters, height, width, channels). cuDNN
orders axes as (batch, channels, height, width); strides describe the layout.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import cudnn
import cupy
import ml_dtypes
import numpy as np
from cuda import pathfinder  # a dependency of CuPy

from ..core.convolution import Convolution, ConvolutionShape
from ..core.layout import Array, Shape

_log = logging.getLogger(__name__)
_WORKSPACE = 1 << 30  # maximum workspace in bytes; algorithms that need more are hardly faster
_DATA_TYPES = {
    np.dtype(np.float32): cudnn.data_type.FLOAT,
    np.dtype(np.float16): cudnn.data_type.HALF,
    np.dtype(ml_dtypes.bfloat16): cudnn.data_type.BFLOAT16,
}
_NOTES = cudnn.numerical_note
# The inputs of each operation, by the names of the frontend's arguments, and its output: fields of ConvolutionShape.
_OPERANDS = {
    "conv_fprop": ({"image": "images", "weight": "filters"}, "outputs"),
    "conv_dgrad": ({"loss": "outputs", "filter": "filters"}, "images"),
    "conv_wgrad": ({"image": "images", "loss": "outputs"}, "filters"),
}
_CUDART = "CUDNN_FRONTEND_CUDART_LIB_NAME"  # the environment variable that names CUDA's runtime library
# A small convolution that every version of cuDNN supports.
_PROBE = ConvolutionShape((8, 16, 16, 8), (8, 3, 3, 8), (8, 16, 16, 8), (1, 1), ((1, 1), (1, 1)))


class ConvolutionPlans:
    """Execution plans of convolutions on the current GPU, cached by shape. All plans are deterministic.

    Args:
        tf32: Whether float32 may be rounded to TF32 for tensor cores.

    Raises:
        Exception: cuDNN does not work in this environment.
    """

    def __init__(self, tf32: bool) -> None:
        _load_cudart()
        self._handle = cudnn.create_handle()
        self._tf32 = tf32
        self._plans: dict[Any, Convolution] = {}
        self._reported: set[str] = set()
        self._operation("conv_fprop", _PROBE, cudnn.data_type.HALF, cudnn.data_type.HALF)

    def plan(
        self, shape: ConvolutionShape, dtype: np.dtype[Any], needs_dx: bool, buffer: Callable[..., Array]
    ) -> Convolution:
        """Return the operations that cuDNN computes; there may be none. They allocate memory without ``buffer``."""
        key = shape, dtype, needs_dx
        if key not in self._plans:
            self._plans[key] = self._make_plan(shape, dtype, needs_dx) if dtype in _DATA_TYPES else Convolution()
        return self._plans[key]

    def _make_plan(self, shape: ConvolutionShape, dtype: np.dtype[Any], needs_dx: bool) -> Convolution:
        data_type, float32 = _DATA_TYPES[dtype], cudnn.data_type.FLOAT
        forward = self._try("the forward pass", "conv_fprop", shape, data_type, data_type)
        dx = self._try("the gradient of the images", "conv_dgrad", shape, data_type, data_type) if needs_dx else None
        # The gradient of the filters is float32 if cuDNN supports that, else of the images' type.
        dw, grad_dtype = self._try("", "conv_wgrad", shape, data_type, float32), np.dtype(np.float32)
        if dw is None:
            dw, grad_dtype = self._try("the gradient of the filters", "conv_wgrad", shape, data_type, data_type), dtype
        return Convolution(forward, dx, dw, grad_dtype)

    def _try(self, title: str, operation: str, shape: ConvolutionShape, data_type: Any, out_type: Any) -> Any:
        """Return the result of ``_operation``; None if it raises an error, which is logged with ``title`` if given."""
        try:
            return self._operation(operation, shape, data_type, out_type)
        except Exception as error:  # the frontend raises ValueError, ImportError and RuntimeError as well as its own
            if title:
                self._report(title, shape, error)
            return None

    def _report(self, title: str, shape: ConvolutionShape, error: Exception) -> None:
        """Log why cuDNN does not compute an operation: always if it has no plan, any other reason only once."""
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        convolution = f"{title} of a convolution (images {shape.images}, filters {shape.filters})"
        if isinstance(error, (cudnn.cudnnGraphNotSupportedError, NotImplementedError)):
            _log.info("cuDNN has no plan for %s, so matrix products are used: %s", convolution, reason)
        elif reason not in self._reported:
            self._reported.add(reason)
            _log.warning(
                "cuDNN failed for %s, so matrix products are used, which are slower: %s; check that the versions of "
                "cuDNN and nvidia-cudnn-frontend match",
                convolution,
                reason,
            )

    def _operation(self, operation: str, shape: ConvolutionShape, data_type: Any, out_type: Any) -> Callable[..., None]:
        """Return a function that computes an operation on three arrays: two inputs of ``data_type``, and the output.

        Raises:
            Exception: cuDNN has no plan, or fails.
        """
        inputs, output = _OPERANDS[operation]
        graph = cudnn.pygraph(
            io_data_type=data_type,
            intermediate_data_type=cudnn.data_type.FLOAT,
            compute_data_type=cudnn.data_type.FLOAT,
            handle=self._handle,
        )
        tensors = {
            name: graph.tensor(name=name, data_type=data_type, **_layout(getattr(shape, field)))
            for name, field in inputs.items()
        }
        out = getattr(graph, operation)(
            **tensors,
            pre_padding=[before for before, _ in shape.padding],
            post_padding=[after for _, after in shape.padding],
            stride=list(shape.stride),
            dilation=[1, 1],
        )
        layout = _layout(getattr(shape, output))
        out.set_output(True).set_data_type(out_type).set_dim(layout["dim"]).set_stride(layout["stride"])
        self._build(graph, data_type)
        operands = *tensors.values(), out

        def run(*arrays: Array) -> None:
            self._execute(graph, dict(zip(operands, arrays, strict=True)))

        return run

    def _build(self, graph: Any, data_type: Any) -> None:
        """Choose and build a deterministic execution plan for a graph."""
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        unwanted = [_NOTES.NONDETERMINISTIC]
        if data_type == cudnn.data_type.FLOAT:
            unwanted.append(_NOTES.DOWN_CONVERT_INPUTS)
            unwanted += [] if self._tf32 else [_NOTES.TENSOR_CORE]
        graph.deselect_numeric_notes(unwanted)
        graph.deselect_workspace_greater_than(_WORKSPACE)
        graph.check_support()
        graph.build_plans()

    def _execute(self, graph: Any, operands: dict[Any, Array]) -> None:
        """Run a built graph on CuPy's current stream."""
        cudnn.set_stream(handle=self._handle, stream=cupy.cuda.get_current_stream().ptr)
        workspace = cupy.empty(max(1, graph.get_workspace_size()), np.uint8)
        pointers = {tensor: array.data.ptr for tensor, array in operands.items()}  # type: ignore[attr-defined]
        graph.execute(pointers, workspace.data.ptr, handle=self._handle)


def _load_cudart() -> None:
    """Give the frontend the path of CUDA's runtime library, with which CuPy is linked statically.

    If the library is not found, the frontend raises its own error later.
    """
    if _CUDART not in os.environ:
        with suppress(pathfinder.DynamicLibNotFoundError):
            os.environ[_CUDART] = pathfinder.load_nvidia_dynamic_lib("cudart").abs_path


def _layout(shape: Shape) -> dict[str, list[int]]:
    """Return cuDNN's dimensions and strides of an array of shape (count, height, width, channels)."""
    count, height, width, channels = shape
    return {
        "dim": [count, channels, height, width],
        "stride": [height * width * channels, 1, width * channels, channels],
    }
