"""Simulates cuDNN's frontend: graphs of one convolution, computed by definition.

It accepts only calls that versions 1.13 and 1.32 of nvidia-cudnn-frontend accept, in the order of their samples. There
is no plan for a gradient of the filters in float32 if the images are float16. Environment variables:

    SIMULATED_CUDNN_CHANNELS: number of channels of filters for which no operation has a plan
    SIMULATED_CUDNN_ERRORS: exceptions that ``validate`` raises, such as "dgrad=ValueError wgrad=ImportError"
"""

from __future__ import annotations

import builtins
import ctypes
import math
import os
from enum import Enum
from typing import Any

import ml_dtypes
import numpy as np
from cuda import pathfinder
from cupy.cuda import current
from cupy.cuda.stream import get_current_stream, submit


class cudnnGraphNotSupportedError(Exception):
    pass


class data_type(Enum):
    FLOAT, HALF, BFLOAT16, NOT_SET = range(4)


class heur_mode(Enum):
    A, B, FALLBACK = range(3)


class numerical_note(Enum):
    TENSOR_CORE, DOWN_CONVERT_INPUTS, REDUCED_PRECISION_REDUCTION, FFT, NONDETERMINISTIC, WINOGRAD = range(6)


_STORED = {
    data_type.FLOAT: (np.float32, ctypes.c_uint32),
    data_type.HALF: (np.float16, ctypes.c_uint16),
    data_type.BFLOAT16: (ml_dtypes.bfloat16, ctypes.c_uint16),
}
_WORKSPACE = 64


class _Handle:
    def __init__(self) -> None:
        self.device, self.stream = current(), None


def backend_version_string() -> str:
    return "9.24.simulated"


def create_handle() -> _Handle:
    return _Handle()


def set_stream(handle: _Handle, stream: int) -> None:
    assert isinstance(handle, _Handle) and handle.device == current()
    handle.stream = stream


class _Tensor:
    def __init__(self, name: str, dim: Any, stride: Any, kind: Any) -> None:
        self.name, self.dim, self.stride, self.kind, self.is_output = name, dim, stride, kind, False

    def set_output(self, value: bool) -> _Tensor:
        self.is_output = value
        return self

    def set_data_type(self, kind: data_type) -> _Tensor:
        self.kind = kind
        return self

    def set_dim(self, dim: list[int]) -> _Tensor:
        self.dim = dim
        return self

    def set_stride(self, stride: list[int]) -> _Tensor:
        self.stride = stride
        return self

    def check(self) -> None:
        assert self.kind in _STORED and len(self.dim) == len(self.stride) == 4
        _, c, h, w = self.dim
        assert self.stride == [h * w * c, 1, w * c, c], f"{self.name} does not lie with its channels last"

    def at(self, address: int) -> np.ndarray:
        """Return the tensor at an address as an array with the channels first."""
        assert isinstance(address, int) and address
        kept, number = _STORED[self.kind]
        flat = np.ctypeslib.as_array(ctypes.cast(address, ctypes.POINTER(number)), (math.prod(self.dim),))
        strides = [stride * flat.itemsize for stride in self.stride]
        return np.lib.stride_tricks.as_strided(flat.view(kept), self.dim, strides)


class pygraph:
    def __init__(
        self, *, io_data_type: Any, intermediate_data_type: Any, compute_data_type: Any, handle: _Handle
    ) -> None:
        assert io_data_type in _STORED and isinstance(handle, _Handle)
        assert intermediate_data_type == compute_data_type == data_type.FLOAT
        self._io, self._handle, self._state = io_data_type, handle, "new"
        self._read: list[_Tensor] = []
        self._notes: list[numerical_note] = []

    def tensor(self, *, name: str, dim: list[int], stride: list[int], data_type: Any) -> _Tensor:
        assert self._state == "new" and all(type(length) is int for length in (*dim, *stride))
        self._read.append(_Tensor(name, dim, stride, data_type))
        return self._read[-1]

    def conv_fprop(self, *, image: _Tensor, weight: _Tensor, **geometry: Any) -> _Tensor:
        return self._made("fprop", (image, weight), **geometry)

    def conv_dgrad(self, *, loss: _Tensor, filter: _Tensor, **geometry: Any) -> _Tensor:
        return self._made("dgrad", (loss, filter), **geometry)

    def conv_wgrad(self, *, image: _Tensor, loss: _Tensor, **geometry: Any) -> _Tensor:
        return self._made("wgrad", (image, loss), **geometry)

    def _made(
        self,
        kind: str,
        read: tuple[_Tensor, _Tensor],
        *,
        pre_padding: list[int],
        post_padding: list[int],
        stride: list[int],
        dilation: list[int],
    ) -> _Tensor:
        assert list(read) == self._read and dilation == [1, 1]
        assert all(len(pair) == 2 for pair in (pre_padding, post_padding, stride))
        self._kind, self._pads, self._stride = kind, (pre_padding, post_padding), stride
        self._out = _Tensor(kind, None, None, None)
        return self._out

    def validate(self) -> None:
        assert self._state == "new" and self._out.is_output
        errors = dict(each.split("=") for each in os.environ.get("SIMULATED_CUDNN_ERRORS", "").split())
        if self._kind in errors:
            raise getattr(builtins, errors[self._kind])(f"{self._kind} failed")
        for tensor in (*self._read, self._out):
            tensor.check()
        (count, c, *lengths), (k, filter_channels, *sizes), (batch, filters, *counts) = self._dims()
        assert (count, c, k) == (batch, filter_channels, filters)
        axes = zip(lengths, sizes, counts, *self._pads, self._stride, strict=True)
        assert all((n + before + after - size) // step + 1 == count for n, size, count, before, after, step in axes)
        self._state = "valid"

    def _dims(self) -> tuple[list[int], list[int], list[int]]:
        """Return the dimensions of images, filters and outputs."""
        a, b, out = (*(tensor.dim for tensor in self._read), self._out.dim)
        return {"fprop": (a, b, out), "dgrad": (out, b, a), "wgrad": (a, out, b)}[self._kind]

    def build_operation_graph(self) -> None:
        self._step("valid", "operations")

    def create_execution_plans(self, modes: list[heur_mode]) -> None:
        assert modes == [heur_mode.A, heur_mode.FALLBACK]
        self._step("operations", "planned")
        if str(self._dims()[1][1]) == os.environ.get("SIMULATED_CUDNN_CHANNELS"):
            raise cudnnGraphNotSupportedError("No valid engine configs")
        if self._kind == "wgrad" and self._io == data_type.HALF and self._out.kind == data_type.FLOAT:
            raise cudnnGraphNotSupportedError("No valid engine configs")

    def deselect_numeric_notes(self, notes: list[numerical_note]) -> None:
        assert self._state == "planned"
        self._notes = notes

    def deselect_workspace_greater_than(self, limit: int) -> None:
        assert self._state == "planned" and limit >= _WORKSPACE

    def check_support(self) -> None:
        assert numerical_note.NONDETERMINISTIC in self._notes, "a plan may differ from run to run"
        if os.environ.get("CUDNN_FRONTEND_CUDART_LIB_NAME") not in pathfinder.loaded:
            raise RuntimeError("Unable to load any libcudart library (tried libcudart.so.12, libcudart.so.13)")
        self._step("planned", "supported")

    def build_plans(self) -> None:
        self._step("supported", "built")

    def _step(self, before: str, after: str) -> None:
        assert self._state == before, f"{self._state}, not {before}"
        self._state = after

    def get_workspace_size(self) -> int:
        assert self._state == "built"
        return _WORKSPACE

    def execute(self, operands: dict[_Tensor, int], workspace: int, *, handle: _Handle) -> None:
        assert self._state == "built" and handle is self._handle and handle.stream == get_current_stream().ptr
        assert set(operands) == {*self._read, self._out}
        scratch = (ctypes.c_ubyte * _WORKSPACE).from_address(workspace)
        first, second = (tensor.at(operands[tensor]) for tensor in self._read)
        out = self._out.at(operands[self._out])

        def compute() -> None:
            scratch[:] = bytes(_WORKSPACE)  # makes any other use of this memory visible
            out[...] = getattr(self, f"_{self._kind}")(self._low(first), self._low(second))

        submit(compute)

    def _low(self, values: np.ndarray) -> np.ndarray:
        """Return values as they are multiplied: float32 is truncated to TF32 unless the notes exclude tensor cores."""
        wide = np.ascontiguousarray(values.astype(np.float32))
        if self._io != data_type.FLOAT or numerical_note.TENSOR_CORE in self._notes:
            return wide
        return (wide.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)

    def _places(self, padded: np.ndarray) -> Any:
        """Yield each place (i, j) in a filter, and the image elements that it multiplies: a view in NCHW order."""
        (_, _, height, width), (_, _, rows, columns) = self._dims()[1:]
        down, right = self._stride
        for i in range(height):
            for j in range(width):
                yield (
                    i,
                    j,
                    padded[:, :, i : i + down * (rows - 1) + 1 : down, j : j + right * (columns - 1) + 1 : right],
                )

    def _padded(self, images: np.ndarray) -> np.ndarray:
        return np.pad(images, ((0, 0), (0, 0), *zip(*self._pads, strict=True)))

    def _fprop(self, images: np.ndarray, filters: np.ndarray) -> np.ndarray:
        return sum(
            np.einsum("nchw,kc->nkhw", place, filters[:, :, i, j]) for i, j, place in self._places(self._padded(images))
        )

    def _wgrad(self, images: np.ndarray, slopes: np.ndarray) -> np.ndarray:
        grad = np.zeros(self._out.dim, np.float32)
        for i, j, place in self._places(self._padded(images)):
            grad[:, :, i, j] = np.einsum("nchw,nkhw->kc", place, slopes)
        return grad

    def _dgrad(self, slopes: np.ndarray, filters: np.ndarray) -> np.ndarray:
        padded = self._padded(np.zeros(self._out.dim, np.float32))
        for i, j, place in self._places(padded):
            place += np.einsum("nkhw,kc->nchw", slopes, filters[:, :, i, j])
        (top, left), (_, _, height, width) = self._pads[0], self._out.dim
        return padded[:, :, top : top + height, left : left + width]
