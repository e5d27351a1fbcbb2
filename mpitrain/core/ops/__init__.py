"""Operations on the CPU, with NumPy and Numba; ``gpu.ops`` has the same operations with equal signatures for GPUs.

Arrays are C-contiguous. Sums have a fixed order, so results are bit-identical in every run.
"""

from ..kernels import sum_rows as sum_rows
from .activations import (
    activate as activate,
    activate_backward as activate_backward,
    add as add,
    add_bias as add_bias,
    add_bias_backward as add_bias_backward,
)
from .batches import add_rows as add_rows, cast as cast, take as take, take_rows as take_rows, transpose as transpose
from .dropout import drop as drop
from .losses import (
    sigmoid_evaluate as sigmoid_evaluate,
    sigmoid_gradient as sigmoid_gradient,
    softmax_evaluate as softmax_evaluate,
    softmax_gradient as softmax_gradient,
    square_evaluate as square_evaluate,
    square_gradient as square_gradient,
)
from .normalization import (
    gradient_sums as gradient_sums,
    layer_norm as layer_norm,
    layer_norm_backward as layer_norm_backward,
    moments as moments,
    normalize as normalize,
    normalize_backward as normalize_backward,
)
from .pooling import (
    average_pool as average_pool,
    average_pool_backward as average_pool_backward,
    max_pool as max_pool,
    max_pool_backward as max_pool_backward,
)
from .windows import add_windows as add_windows, copy_windows as copy_windows
