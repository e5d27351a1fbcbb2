"""Operations on the CPU, with NumPy and Numba; ``gpu.ops`` has the same operations with equal signatures for GPUs.

Arrays are C-contiguous. Sums have a fixed order, so results are bit-identical in every run.
"""

from ..kernels import sum_rows
from .activations import activate, activate_backward, add, add_bias, add_bias_backward
from .batches import cast, take, transpose
from .dropout import drop
from .embedding import add_rows, take_rows
from .losses import (
    sigmoid_evaluate,
    sigmoid_gradient,
    softmax_evaluate,
    softmax_gradient,
    square_evaluate,
    square_gradient,
)
from .normalization import gradient_sums, layer_norm, layer_norm_backward, moments, normalize, normalize_backward
from .pooling import average_pool, average_pool_backward, max_pool, max_pool_backward
from .windows import add_windows, copy_windows

__all__ = [
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
    "max_pool_backward",
    "moments",
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
    "transpose",
]
