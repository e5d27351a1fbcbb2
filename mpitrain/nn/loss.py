"""Losses summed over the examples of a batch, computed with their gradients in one pass."""

from __future__ import annotations

import math
from typing import Any

from ..core.device import CPU, Device
from ..core.layout import Array, Shape
from ..errors import JobError


class Loss:
    """A function of a model's outputs and the labels, summed over the examples of a batch.

    A non-finite output or an invalid label makes the loss NaN.

    Attributes:
        device: Device of outputs, labels and gradients.
        scale: Factor of the gradient, but not of the loss: a device array of shape (1,), float64, read when each
            gradient is computed. None for 1.
        supports_amp: Whether the loss accepts 16-bit outputs and multiplies by ``scale``; otherwise it gets outputs of
            the parameters' type, and its gradient is multiplied afterwards.
    """

    device: Device = CPU
    scale: Array | None = None
    supports_amp = False

    def __init_subclass__(cls) -> None:
        """Reset ``supports_amp`` in classes that override a method; they must declare support themselves."""
        if not {"__call__", "evaluate"}.isdisjoint(own := vars(cls)):
            cls.supports_amp = bool(own.get("supports_amp", False))

    def __init__(self) -> None:
        self._gradients: dict[tuple[Shape, str], Array] = {}

    @property
    def ops(self) -> Any:
        """The operations of the device, ``core.ops`` or ``gpu.ops``."""
        return self.device.ops

    @property
    def buffer_bytes(self) -> int:
        """Bytes of gradient buffers."""
        return sum(gradient.nbytes for gradient in self._gradients.values())

    def check(self, shape: Shape, classes: int | None) -> None:
        """Check that a model's outputs for one example, of ``shape``, match the number of classes.

        Raises:
            JobError: The outputs do not match.
        """

    def classes(self, shape: Shape) -> int | None:
        """Return the number of classes for outputs of ``shape``; None if labels are not classes."""
        return None

    def __call__(self, outputs: Array, labels: Array, weight: float) -> tuple[float, Array]:
        """Return ``weight`` times the sum of the losses, and its gradient with respect to ``outputs``.

        The gradient is a buffer that the next call overwrites.

        Raises:
            JobError: The labels' shape or type does not match the outputs.
        """
        raise NotImplementedError

    def evaluate(self, outputs: Array, labels: Array) -> tuple[float, int | None]:
        """Return the sum of the losses, and the number of correct predictions, or None if undefined.

        Raises:
            JobError: The labels' shape or type does not match the outputs.
        """
        raise NotImplementedError

    def _gradient(self, outputs: Array) -> Array:
        key = outputs.shape, outputs.dtype.char
        gradient = self._gradients.get(key)
        if gradient is None:
            gradient = self._gradients[key] = self.device.empty(outputs.shape, outputs.dtype)
        return gradient


class SoftmaxCrossEntropy(Loss):
    """``-log softmax(outputs)[label]``: outputs (batch, classes), labels (batch,) integers in [0, classes)."""

    supports_amp = True

    def check(self, shape: Shape, classes: int | None) -> None:
        if len(shape) != 1 or (classes is not None and shape[0] < classes):
            wanted = "classes" if classes is None else f"{classes}"
            raise JobError(
                f"SoftmaxCrossEntropy: the model's output shape is {shape}, but the labels have {wanted} classes; "
                f"end the model with Dense(..., {wanted})"
            )

    def classes(self, shape: Shape) -> int | None:
        return shape[0]

    def __call__(self, outputs: Array, labels: Array, weight: float) -> tuple[float, Array]:
        _check_classes(outputs, labels)
        gradient = self._gradient(outputs)
        return self.ops.softmax_gradient(outputs, labels, weight, gradient, self.scale), gradient

    def evaluate(self, outputs: Array, labels: Array) -> tuple[float, int | None]:
        _check_classes(outputs, labels)
        return self.ops.softmax_evaluate(outputs, labels)


class SigmoidCrossEntropy(Loss):
    """``-log sigmoid(output)`` where the label is 1, ``-log(1 - sigmoid(output))`` where it is 0.

    Outputs (batch, ...), labels of the same shape in [0, 1], or (batch,) for outputs (batch, 1). An example's loss is
    the mean over its elements. A prediction is correct if all its elements are correct.
    """

    supports_amp = True

    def __call__(self, outputs: Array, labels: Array, weight: float) -> tuple[float, Array]:
        gradient = self._gradient(outputs)
        pair = _paired(self, outputs, labels)
        return self.ops.sigmoid_gradient(*pair, weight, gradient.reshape(pair[0].shape), self.scale), gradient

    def evaluate(self, outputs: Array, labels: Array) -> tuple[float, int | None]:
        return self.ops.sigmoid_evaluate(*_paired(self, outputs, labels))


class MeanSquaredError(Loss):
    """Mean of ``(output - label) ** 2`` over an example's elements.

    Outputs (batch, ...), labels of the same shape, or (batch,) for outputs (batch, 1).
    """

    supports_amp = True

    def __call__(self, outputs: Array, labels: Array, weight: float) -> tuple[float, Array]:
        gradient = self._gradient(outputs)
        pair = _paired(self, outputs, labels)
        return self.ops.square_gradient(*pair, weight, gradient.reshape(pair[0].shape), self.scale), gradient

    def evaluate(self, outputs: Array, labels: Array) -> tuple[float, int | None]:
        return self.ops.square_evaluate(*_paired(self, outputs, labels)), None


def _check_classes(outputs: Array, labels: Array) -> None:
    if outputs.ndim != 2 or labels.shape != outputs.shape[:1] or labels.dtype.kind not in "iu":
        fix = "end the model with Dense(…, classes)" if outputs.ndim != 2 else "give one integer for each example"
        raise JobError(
            "SoftmaxCrossEntropy requires outputs (batch, classes) and integer labels (batch,), "
            f"got {outputs.shape} and {labels.dtype} {labels.shape}; {fix}"
        )


def _paired(loss: Loss, outputs: Array, labels: Array) -> tuple[Array, Array]:
    """Return outputs and labels as matrices of the same shape, (batch, elements of an example)."""
    if labels.shape != outputs.shape and (labels.shape != outputs.shape[:1] or outputs[:1].size > 1):
        raise JobError(
            f"{type(loss).__name__} requires labels with the outputs' shape {outputs.shape}, "
            f"got {labels.shape}; the last layer needs as many features as a label has"
        )
    matrix = len(outputs), math.prod(outputs.shape[1:])
    return outputs.reshape(matrix), labels.reshape(matrix)
