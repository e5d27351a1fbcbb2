"""Convolution as matrix products over blocks of windows that stay in cache, or by faster operations of the device."""

from __future__ import annotations

from numbers import Integral
from typing import Any

from ..core.convolution import Convolution, ConvolutionShape
from ..core.layout import Array, Shape
from ..errors import JobError
from .arguments import positive, wrong_shape
from .biased import Biased
from .init import he_normal, zeros
from .layer import Context, Initializer, Layer
from .windows import Axis, Grid, Padding


class Conv2D(Biased):
    """Cross-correlation of images (height, width, in_channels) with ``filters`` kernels, plus a bias.

    The windows of a few images at a time are copied to the rows of a matrix, which is multiplied by the weight. On a
    CPU the bias is an additional row of the weight, with a one at the end of every window. Backward copies the windows
    again, unless they are smaller than the outputs. Copying is cheaper than reading the windows from memory.

    The device may have faster operations: for kernels of 3 x 3 with stride 1, at least 16 input channels and 16
    filters, a CPU uses Winograd's algorithm (``core.winograd``) unless there are few outputs. A GPU uses cuDNN.

    Args:
        in_channels: Channels of an image.
        filters: Channels of an output.
        kernel: Side of the square window, or (height, width).
        stride: Stride of the window, or (down, right).
        padding: ``same`` adds zeros such that an output has length ceil(length / stride); an odd zero is at the end.
            ``valid`` adds no zeros. An integer is the number of zeros on each of the four sides.
        bias: Whether to add a bias.
        weight_init: Initial values of ``weight``, shape (height, width, in_channels, filters).
        name: Overrides the name that the model assigns.
    """

    supports_amp = True
    weight: Array
    weight_grad: Array

    def __init__(
        self,
        in_channels: int,
        filters: int,
        kernel: int | tuple[int, int],
        stride: int | tuple[int, int] = 1,
        padding: Padding = "same",
        bias: bool = True,
        weight_init: Initializer = he_normal,
        name: str | None = None,
    ) -> None:
        super().__init__(name)
        self.in_channels = positive(self, "in_channels", in_channels)
        self.filters = positive(self, "filters", filters)
        self.kernel = _pair(self, "kernel", kernel)
        self.stride = _pair(self, "stride", stride)
        self.padding = _padding(padding)
        self.has_bias = bool(bias)
        self.weight_init = weight_init

    def build(self, shape: Shape) -> Shape:
        if len(shape) != 3 or shape[2] != self.in_channels:
            hint = (
                f"set in_channels={shape[2]}" if len(shape) == 3 else "insert Reshape(height, width, channels) before"
            )
            raise wrong_shape(self, ("height", "width", self.in_channels), shape, hint)
        rows, columns = (Axis.lay(shape[i], self.kernel[i], self.stride[i], self.padding) for i in (0, 1))
        if min(rows.windows, columns.windows) < 1:
            raise JobError(
                f"Conv2D: kernel is {self.kernel}, but the image is {shape[:2]} with padding {self.padding!r}; "
                "use a smaller kernel or more padding"
            )
        self._grid = Grid(rows, columns, self.in_channels)
        self.declare("weight", (*self.kernel, self.in_channels, self.filters), self.weight_init)
        if self.has_bias:
            self.declare("bias", (self.filters,), zeros)
        return (rows.windows, columns.windows, self.filters)

    def forward(self, x: Array, ctx: Context) -> Array:
        x = self.cast_input(x, "x")
        y = self.activations("y", (len(x), self._grid.rows.windows, self._grid.columns.windows, self.filters))
        self._x, self._plan = x, self._planned(x, y)
        if self._plan.forward is None:
            self._prepare()
            self._multiply(y)
        else:
            self._plan.forward(x, self._filters, y)
        if not self.has_bias:
            return y
        return self.finish(y.reshape(-1, self.filters), None if self._multiplies_bias else self.bias).reshape(y.shape)

    def backward(self, dy: Array) -> Array | None:
        dy = self.cast_input(dy, "dy")
        if self.has_bias:
            self.finish_backward(dy.reshape(-1, self.filters), None if self._multiplies_bias else self.bias_grad)
        dx = self.activations("dx", self._grid.images_shape(len(dy))) if self.needs_dx else None
        plan = self._plan
        if plan.filter_gradient is not None and plan.filters_last:
            plan.filter_gradient(self._x, dy, self.weight_grad)
        elif plan.filter_gradient is not None:
            grad = self.buffer("turned_grad", (self.filters, *self.kernel, self.in_channels), plan.grad_dtype)
            plan.filter_gradient(self._x, dy, grad)
            turned = grad.reshape(self.filters, -1)
            self.ops.transpose(turned, self.weight_grad.reshape(-1, self.filters))
        if dx is not None and plan.data_gradient is not None:
            plan.data_gradient(dy, self._filters, dx)
        multiplies_dx = dx is not None and plan.data_gradient is None
        if plan.filter_gradient is None or multiplies_dx:
            if plan.forward is not None:
                self._prepare()
            self._multiply_backward(dy, plan.filter_gradient is None, dx if multiplies_dx else None)
        return dx

    def _planned(self, x: Array, y: Array) -> Convolution:
        """Return the operations that are not products of windows, with the filters in their layout if needed."""
        filters = self.filters, *self.kernel, self.in_channels
        rows, columns = self._grid.rows, self._grid.columns
        padding = (rows.before, rows.after), (columns.before, columns.after)
        shape = ConvolutionShape(x.shape, filters, y.shape, self.stride, padding)
        convolutions = self.device.convolutions
        if convolutions is None or x.dtype != (self.compute_dtype or self.dtype):
            return Convolution()
        plan: Convolution = convolutions.plan(shape, x.dtype, self.needs_dx, self.buffer)
        if plan.filters_last:
            self._filters = self.weight
        elif plan.forward is not None or plan.data_gradient is not None:
            self._filters = self.activations("filters", filters)
            self.ops.transpose(self.weight.reshape(-1, self.filters), self._filters.reshape(self.filters, -1))
        return plan

    def _prepare(self) -> None:
        """Pad the images and lay out the weight for matrix products."""
        self._padded, self._weight = self._pad(self._x), self._matrix()

    def _multiply(self, y: Array) -> None:
        """Compute ``y`` by products of windows and weight, including the bias unless it is added afterwards."""
        grid = self._grid
        for images in grid.image_blocks(len(y), self._block):
            for rows in grid.row_blocks(self._block):
                windows = self._windows(images, rows)
                self._lay_out(images, rows, windows)
                self.device.matmul(windows, self._weight, out=y[images, rows].reshape(-1, self.filters))

    def _multiply_backward(self, dy: Array, needs_grad: bool, dx: Array | None) -> None:
        """Compute ``dx`` unless it is None, and if ``needs_grad`` the gradient of the weight and its row of biases."""
        if needs_grad:
            self.weight_grad[...] = 0
            if self._multiplies_bias:
                self.bias_grad[...] = 0
        grid = self._grid
        for images in grid.image_blocks(len(dy), self._block):
            padded_grad = None if dx is None else self._zeros(images)
            for rows in grid.row_blocks(self._block):
                block = dy[images, rows].reshape(-1, self.filters)
                windows = self._windows(images, rows)
                if needs_grad:
                    if not self._keeps_windows:
                        self._lay_out(images, rows, windows)
                    self._add_gradients(windows, block)
                if padded_grad is not None:
                    self._add_input_gradient(windows, block, rows, padded_grad)
            if dx is not None and padded_grad is not None:
                dx[images] = grid.inside(padded_grad)

    def _add_gradients(self, windows: Array, dy: Array) -> None:
        grad = self.buffer("grad", (windows.shape[1], self.filters))
        self.device.matmul(windows.T, dy, out=grad)
        total = self.weight_grad.reshape(-1, self.filters)
        self.device.xp.add(total, grad[: len(total)], out=total)
        if self._multiplies_bias:
            self.device.xp.add(self.bias_grad, grad[-1], out=self.bias_grad)

    def _add_input_gradient(self, windows: Array, dy: Array, rows: slice, padded_grad: Array) -> None:
        """Add the gradient of ``windows``, which overwrites them, to ``padded_grad``."""
        weight = self._weight[: self._grid.window_size]
        self.device.matmul(dy, weight.T, out=windows[:, : len(weight)])
        self._grid.add(self.ops, windows, rows, padded_grad)

    def _matrix(self) -> Array:
        """Return the weight, shape (window size, filters), with the bias as its last row if it is multiplied."""
        weight = self.weight.reshape(-1, self.filters)
        if not self._multiplies_bias:
            return self.cast_param(weight, "weight")
        matrix = self.buffer("matrix", (len(weight) + 1, self.filters))
        matrix[:-1] = weight
        matrix[-1] = self.bias
        return matrix

    def _pad(self, x: Array) -> Array:
        """Return ``x`` with its border of zeros."""
        if not self._grid.is_padded:
            return self.device.xp.ascontiguousarray(x)
        padded = self.activations("padded", self._grid.padded_shape(len(x)), fill=0)
        self._grid.inside(padded)[...] = x
        return padded

    def _zeros(self, images: slice) -> Array:
        padded_grad = self.activations("padded_grad", self._grid.padded_shape(images.stop - images.start))
        padded_grad[...] = 0
        return padded_grad

    @property
    def _block(self) -> int:
        """Elements of windows per block."""
        return self.device.block_bytes // (self.compute_dtype or self.dtype).itemsize

    @property
    def _multiplies_bias(self) -> bool:
        return self.has_bias and self.device.multiplies_bias and self._plan.forward is None

    @property
    def _keeps_windows(self) -> bool:
        return self._plan.forward is None and self._grid.window_size < self.filters

    def _windows(self, images: slice, rows: slice) -> Array:
        """Return the buffer of a block's windows, shape (windows, window size plus one for a bias).

        The additional column contains ones.
        """
        columns = self._grid.window_size + self._multiplies_bias
        span = self._grid.span(images, rows)
        if not self._keeps_windows:
            return self.activations("windows", (span.stop - span.start, columns), fill=1)
        all_windows = len(self._padded) * self._grid.rows.windows * self._grid.columns.windows
        return self.activations("windows", (all_windows, columns), fill=1)[span]

    def _lay_out(self, images: slice, rows: slice, windows: Array) -> None:
        self._grid.copy(self.ops, self._padded[images], rows, windows)


def _pair(layer: Layer, name: str, value: Any) -> tuple[int, int]:
    both = value if isinstance(value, tuple | list) and len(value) == 2 else (value, value)
    return positive(layer, name, both[0]), positive(layer, name, both[1])


def _padding(value: Any) -> Padding:
    if value == "same" or value == "valid":
        return value  # type: ignore[no-any-return]
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < 0:
        raise JobError(f"Conv2D: padding is {value!r}, must be 'same', 'valid' or an integer >= 0")
    return int(value)
