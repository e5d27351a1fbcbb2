"""Element-wise activations, without parameters.

NumPy's vectorized exp and tanh are used where available: Numba calls libm for one element at a time.
"""

from __future__ import annotations

import math

from ..core.kernels import kernel
from ..core.layout import Array
from .arguments import within
from .layer import Context, Layer


class Activation(Layer):
    """An element-wise function.

    Attributes:
        kind: The function's name in kernels.
        slope: Slope of a leaky ReLU for negative x.
        follows_bias: Whether the previous layer applies it, in a fused kernel. Set by the container.
        in_place: Overwrite ``x``. Set by the container if no other layer reads x.
    """

    supports_amp = True
    kind: str
    slope = 0.0
    follows_bias = False
    in_place = False

    def forward(self, x: Array, ctx: Context) -> Array:
        kernels = self.device.kernels
        if kernels is None:
            return self._activate(x)
        if self.follows_bias:
            return x
        x = self.cast_input(x, "x")
        y = x if self.in_place else self.activations("y", x.shape)
        kernels.activate(x, self.kind, self.slope, y)
        self._kept = x if self.kind == "gelu" else y
        return y

    def backward(self, dy: Array) -> Array:
        kernels = self.device.kernels
        if kernels is None:
            return self._differentiate(self.device.xp.ascontiguousarray(dy))
        if self.follows_bias:
            return dy
        dy = self.cast_input(dy, "dy")
        kernels.activate_backward(self._kept, self.kind, self.slope, dy)
        return dy

    def _activate(self, x: Array) -> Array:
        raise NotImplementedError

    def _differentiate(self, dy: Array) -> Array:
        """Return the gradient of x; it may overwrite ``dy``."""
        raise NotImplementedError


class ReLU(Activation):
    """``max(x, 0)``; NaN stays NaN."""

    kind = "relu"

    def _activate(self, x: Array) -> Array:
        if self.in_place:
            self._y = x
            self.dispatch(_relu_in_place)(x.reshape(-1))
        else:
            self._y = self.buffer("y", x.shape)
            self.dispatch(_relu)(x.reshape(-1), self._y.reshape(-1))
        return self._y

    def _differentiate(self, dy: Array) -> Array:
        self.dispatch(_relu_backward)(self._y.reshape(-1), dy.reshape(-1))
        return dy


class LeakyReLU(Activation):
    """``x`` if it is positive, else ``slope * x``.

    Args:
        slope: In [0, 1).
        name: Overrides the name that the model assigns.
    """

    kind = "leaky_relu"

    def __init__(self, slope: float = 0.01, name: str | None = None) -> None:
        super().__init__(name)
        self.slope = within(self, "slope", slope, 0, 1)

    def _activate(self, x: Array) -> Array:
        self._x = x
        y = self.buffer("y", x.shape)
        self.dispatch(_leaky_relu)(x.reshape(-1), x.reshape(-1), self.slope, y.reshape(-1))
        return y

    def _differentiate(self, dy: Array) -> Array:
        dx = self.buffer("dx", dy.shape)
        self.dispatch(_leaky_relu)(self._x.reshape(-1), dy.reshape(-1), self.slope, dx.reshape(-1))
        return dx


class GELU(Activation):
    """``x * Phi(x)`` with the normal distribution function Phi, computed by erf instead of the tanh approximation.

    Hendrycks and Gimpel, Gaussian error linear units, arXiv:1606.08415, section 2.
    """

    kind = "gelu"

    def _activate(self, x: Array) -> Array:
        self._x, y = x, self.buffer("y", x.shape)
        self._phi = self.buffer("phi", x.shape)
        self.dispatch(_gelu)(x.reshape(-1), self._phi.reshape(-1), y.reshape(-1))
        return y

    def _differentiate(self, dy: Array) -> Array:
        self.dispatch(_gelu_backward)(self._x.reshape(-1), self._phi.reshape(-1), dy.reshape(-1))
        return dy


class Tanh(Activation):
    """Hyperbolic tangent."""

    kind = "tanh"

    def _activate(self, x: Array) -> Array:
        self._y = self.device.xp.tanh(x, out=self.buffer("y", x.shape))
        return self._y

    def _differentiate(self, dy: Array) -> Array:
        self.dispatch(_tanh_backward)(self._y.reshape(-1), dy.reshape(-1))
        return dy


class Sigmoid(Activation):
    """``1 / (1 + exp(-x))``, accurate in both tails."""

    kind = "sigmoid"

    def _activate(self, x: Array) -> Array:
        self._y = self.device.xp.abs(x, out=self.buffer("y", x.shape))
        self.device.xp.negative(self._y, out=self._y)
        self.device.xp.exp(self._y, out=self._y)
        self.dispatch(_sigmoid)(x.reshape(-1), self._y.reshape(-1))
        return self._y

    def _differentiate(self, dy: Array) -> Array:
        self.dispatch(_sigmoid_backward)(self._y.reshape(-1), dy.reshape(-1))
        return dy


@kernel
def _relu(x: Array, y: Array) -> None:
    zero = y.dtype.type(0)
    for i in range(y.size):
        y[i] = zero if x[i] <= 0 else x[i]


@kernel
def _relu_in_place(x: Array) -> None:
    zero = x.dtype.type(0)
    for i in range(x.size):
        x[i] = zero if x[i] <= 0 else x[i]


@kernel
def _relu_backward(y: Array, dy: Array) -> None:
    zero = dy.dtype.type(0)
    for i in range(dy.size):
        dy[i] = zero if y[i] <= 0 else dy[i]


@kernel
def _leaky_relu(x: Array, values: Array, slope: float, out: Array) -> None:
    """Set ``out`` to ``values``, times ``slope`` where ``x`` is not positive."""
    factor = out.dtype.type(slope)
    for i in range(out.size):
        out[i] = factor * values[i] if x[i] <= 0 else values[i]


@kernel
def _gelu(x: Array, phi: Array, y: Array) -> None:
    half, one, root = y.dtype.type(0.5), y.dtype.type(1), y.dtype.type(math.sqrt(0.5))
    for i in range(y.size):
        # erfc instead of 1 + erf, which would cancel in the left tail.
        phi[i] = half * math.erfc(-x[i] * root) if x[i] < 0 else half * (one + math.erf(x[i] * root))
        y[i] = x[i] * phi[i]


@kernel
def _gelu_backward(x: Array, phi: Array, dy: Array) -> None:
    half, peak = dy.dtype.type(0.5), dy.dtype.type(1 / math.sqrt(2 * math.pi))
    for i in range(dy.size):
        dy[i] *= phi[i] + x[i] * peak * math.exp(-half * x[i] * x[i])


@kernel
def _tanh_backward(y: Array, dy: Array) -> None:
    one = dy.dtype.type(1)
    for i in range(dy.size):
        dy[i] *= one - y[i] * y[i]


@kernel
def _sigmoid(x: Array, y: Array) -> None:
    """Replace ``y``, which holds ``exp(-abs(x))``, with the sigmoid of x."""
    one = y.dtype.type(1)
    for i in range(y.size):
        y[i] = (y[i] if x[i] < 0 else one) / (one + y[i])


@kernel
def _sigmoid_backward(y: Array, dy: Array) -> None:
    one = dy.dtype.type(1)
    for i in range(dy.size):
        dy[i] *= y[i] * (one - y[i])
