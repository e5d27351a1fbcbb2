"""Element kernels on the device: each function has the name and the arguments of the Numba form that it stands for.

Arrays are those of the device, C-contiguous; nothing here waits for it. So what is a Python number in the Numba form is
here a float64 array, of shape () or (2,), which the caller reads when it has to.

A result is the same bits at every run, and on every GPU for which the compiler makes the same code: sums are taken in
an order that depends on shapes alone.
"""

from .activation import ACTIVATIONS, activate, activate_backward, add, add_bias, add_bias_backward
from .grid import KINDS, Kernels, Pair, use
from .layers import (
    add_rows,
    add_windows,
    average_pool,
    average_pool_backward,
    copy_windows,
    drop,
    gradient_sums,
    layer_norm,
    layer_norm_backward,
    max_pool,
    max_pool_2,
    max_pool_backward,
    moment_sums,
    normalize,
    normalize_backward,
    take_rows,
)
from .losses import (
    sigmoid_evaluate,
    sigmoid_gradient,
    softmax_evaluate,
    softmax_gradient,
    square_evaluate,
    square_gradient,
)
from .updates import RULES, measure_segments, update_segments
from .vectors import cast, sum_rows, take

__all__ = [
    "ACTIVATIONS",
    "KINDS",
    "RULES",
    "Kernels",
    "Pair",
    "activate",
    "activate_backward",
    "add",
    "add_bias",
    "add_bias_backward",
    "add_rows",
    "add_windows",
    "average_pool",
    "average_pool_backward",
    "cast",
    "copy_windows",
    "drop",
    "gradient_sums",
    "layer_norm",
    "layer_norm_backward",
    "max_pool",
    "max_pool_2",
    "max_pool_backward",
    "measure_segments",
    "moment_sums",
    "normalize",
    "normalize_backward",
    "sigmoid_evaluate",
    "sigmoid_gradient",
    "softmax_evaluate",
    "softmax_gradient",
    "square_evaluate",
    "square_gradient",
    "sum_rows",
    "take",
    "take_rows",
    "update_segments",
    "use",
]
