"""Losses of outputs, shape (batch, classes or elements).

A gradient function sets ``gradient`` and returns ``weight`` times the sum of the losses; ``scale`` is None, because
only GPUs scale gradients. An evaluation returns the sum of the losses and, if defined, the number of correct
predictions.
"""

from __future__ import annotations

import math

import numpy as np

from ..kernels import kernel, reduction
from ..layout import Array


@kernel
def softmax_gradient(outputs: Array, labels: Array, weight: float, gradient: Array, scale: None) -> float:
    share = outputs.dtype.type(weight)
    total = 0.0
    for i in range(outputs.shape[0]):
        label = labels[i]
        if label < 0 or label >= outputs.shape[1]:
            gradient[i] = np.nan
            total += np.nan
            continue
        largest = _largest(outputs[i])
        normalizer = nothing = outputs.dtype.type(0)
        for j in range(outputs.shape[1]):
            gradient[i, j] = math.exp(outputs[i, j] - largest)
            normalizer += gradient[i, j]
            nothing += 0 * outputs[i, j]  # NaN if an output is infinite
        factor = share / normalizer
        for j in range(outputs.shape[1]):
            gradient[i, j] *= factor
        gradient[i, label] -= share
        total += math.log(normalizer) - (outputs[i, label] - largest) + nothing
    return weight * total


@kernel
def softmax_evaluate(outputs: Array, labels: Array) -> tuple[float, int]:
    total, correct = 0.0, 0
    for i in range(outputs.shape[0]):
        label = labels[i]
        if label < 0 or label >= outputs.shape[1]:
            total += np.nan
            continue
        largest = _largest(outputs[i])
        normalizer = nothing = outputs.dtype.type(0)
        for j in range(outputs.shape[1]):
            normalizer += math.exp(outputs[i, j] - largest)
            nothing += 0 * outputs[i, j]
        loss = math.log(normalizer) - (outputs[i, label] - largest) + nothing
        total += loss
        if not math.isnan(loss) and _first_largest(outputs[i]) == label:
            correct += 1
    return total, correct


@reduction
def _largest(row: Array) -> float:
    largest = row[0]
    for j in range(1, row.size):
        largest = max(largest, row[j])
    return largest


@kernel
def _first_largest(row: Array) -> int:
    best = 0
    for j in range(1, row.size):
        if row[j] > row[best]:
            best = j
    return best


@kernel
def sigmoid_gradient(outputs: Array, labels: Array, weight: float, gradient: Array, scale: None) -> float:
    share = outputs.dtype.type(weight / outputs.shape[1])
    one = outputs.dtype.type(1)
    total = 0.0
    for i in range(outputs.shape[0]):
        for j in range(outputs.shape[1]):
            z, label = outputs[i, j], outputs.dtype.type(labels[i, j])
            total += _sigmoid_loss(z, label)
            tail = math.exp(-abs(z))  # the sign that cannot overflow
            probability = (one if z >= 0 else tail) / (one + tail)
            gradient[i, j] = (probability - label) * share
    return weight / outputs.shape[1] * total


@kernel
def sigmoid_evaluate(outputs: Array, labels: Array) -> tuple[float, int]:
    total, correct = 0.0, 0
    for i in range(outputs.shape[0]):
        right = True
        for j in range(outputs.shape[1]):
            z, label = outputs[i, j], outputs.dtype.type(labels[i, j])
            loss = _sigmoid_loss(z, label)
            total += loss
            right = right and not math.isnan(loss) and (z > 0) == (label > 0.5)
        correct += 1 if right else 0
    return total / outputs.shape[1], correct


@kernel
def _sigmoid_loss(z: float, label: float) -> float:
    if not (label >= 0 and label <= 1):
        return z * np.nan
    nothing = 0 * z  # NaN if z is infinite
    return max(z, 0 * label) - z * label + math.log1p(math.exp(-abs(z))) + nothing


@reduction
def square_gradient(outputs: Array, labels: Array, weight: float, gradient: Array, scale: None) -> float:
    slope = outputs.dtype.type(2 * weight / outputs.shape[1])
    total = 0.0
    for i in range(outputs.shape[0]):
        for j in range(outputs.shape[1]):
            difference = outputs[i, j] - outputs.dtype.type(labels[i, j])
            total += difference * difference + 0 * outputs[i, j]  # NaN if an output is infinite
            gradient[i, j] = slope * difference
    return weight / outputs.shape[1] * total


@reduction
def square_evaluate(outputs: Array, labels: Array) -> float:
    total = 0.0
    for i in range(outputs.shape[0]):
        for j in range(outputs.shape[1]):
            difference = outputs[i, j] - outputs.dtype.type(labels[i, j])
            total += difference * difference + 0 * outputs[i, j]
    return total / outputs.shape[1]
