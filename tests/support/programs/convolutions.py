"""Compare convolutions on a GPU, which may be simulated, with convolutions on the CPU.

Prints a line per convolution: the precision, the operations that cuDNN computed, and the convolution's arguments.
"""

import itertools
import logging
import sys

import numpy as np

from mpitrain import nn
from mpitrain.gpu.device import Gpu
from mpitrain.nn.layer import bind, initialize, layout_of, to_device

TOLERANCE = {"float32": 1e-5, "tf32": 2e-3, "bfloat16": 3e-2, "float16": 4e-3}


def step(layer, x, dy, gpu=None):
    """Return the outputs, the gradient of x and the gradients of the parameters."""
    layout = layout_of(layer, x.shape[1:], np.float32)
    params, grads = np.zeros(layout.size, np.float32), np.zeros(layout.size, np.float32)
    initialize(layer, layout, params, 3)
    params += 0.1  # so that biases are not zero
    if gpu is None:
        bind(layer, layout, params, grads)
        return [layer.forward(x, nn.Context()).copy(), layer.backward(dy.copy()).copy(), grads]
    to_device(layer, gpu)
    with gpu.activate():
        device_grads = gpu.zeros(grads.shape, np.float32)
        bind(layer, layout, gpu.copy_of(params), device_grads)
        outputs = layer.forward(gpu.copy_of(x), nn.Context())
        results = [outputs, layer.backward(gpu.copy_of(dy)), device_grads]
        return [to_host(gpu, array) for array in results]


def to_host(gpu, array):
    """Copy an array of the GPU to the host, as float32."""
    host = np.empty(array.shape, array.dtype)
    gpu.download(array, host)
    return host.astype(np.float32)


for precision in sys.argv[1:]:
    gpu = Gpu(0, 0.5, precision=precision)
    logging.basicConfig(stream=sys.stdout, format="%(message)s", level=logging.INFO)
    cases = itertools.product([(1, 1), (3, 3), (2, 4)], [1, (2, 3)], ["same", "valid", 2], [True, False])
    for kernel, stride, padding, bias in cases:
        rng = np.random.default_rng(0)
        x = rng.standard_normal((3, 9, 8, 5)).astype(np.float32)

        def make(kernel=kernel, stride=stride, padding=padding, bias=bias):
            return nn.Conv2D(5, 6, kernel, stride, padding, bias)

        dy = rng.standard_normal((3, *make().build(x.shape[1:]))).astype(np.float32)
        layer = make()
        found, expected = step(layer, x, dy, gpu), step(make(), x, dy)
        for one, two in zip(found, expected, strict=True):
            assert np.linalg.norm(one - two) <= TOLERANCE[precision] * np.linalg.norm(two), (kernel, stride, padding)
        exact = all(one.tobytes() == two.tobytes() for one, two in zip(found, expected, strict=True))
        assert exact is False or precision == "float32"
        by_library = [name for name in ("forward", "data_gradient", "filter_gradient") if getattr(layer._plan, name)]
        how = {0: "windows", 3: "cuDNN"}.get(len(by_library), ",".join(by_library))
        print(precision, how, kernel, stride, padding, bias)
