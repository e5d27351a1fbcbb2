"""Element kernels on the GPU: each function has the name and arguments of the Numba kernel that it replaces.

Arrays are C-contiguous device arrays, and no function waits for the device. Results that the Numba kernel returns as
Python numbers are float64 arrays of shape () or (2,), which the caller reads when needed.

Results are bit-identical in every run, and on every GPU for which the compiler generates the same code: the order of
sums depends only on shapes.
"""

from .activation import (
    ACTIVATIONS as ACTIVATIONS,
    activate as activate,
    activate_backward as activate_backward,
    add as add,
    add_bias as add_bias,
    add_bias_backward as add_bias_backward,
)
from .grid import KINDS as KINDS, Kernels as Kernels, Pair as Pair, use as use
from .layers import (
    add_rows as add_rows,
    add_windows as add_windows,
    average_pool as average_pool,
    average_pool_backward as average_pool_backward,
    copy_windows as copy_windows,
    drop as drop,
    gradient_sums as gradient_sums,
    layer_norm as layer_norm,
    layer_norm_backward as layer_norm_backward,
    max_pool as max_pool,
    max_pool_2 as max_pool_2,
    max_pool_backward as max_pool_backward,
    moment_sums as moment_sums,
    normalize as normalize,
    normalize_backward as normalize_backward,
    take_rows as take_rows,
)
from .losses import (
    sigmoid_evaluate as sigmoid_evaluate,
    sigmoid_gradient as sigmoid_gradient,
    softmax_evaluate as softmax_evaluate,
    softmax_gradient as softmax_gradient,
    square_evaluate as square_evaluate,
    square_gradient as square_gradient,
)
from .updates import (
    FACTOR as FACTOR,
    GO as GO,
    GOOD as GOOD,
    OVERFLOW as OVERFLOW,
    OWN as OWN,
    POLICIES as POLICIES,
    RULES as RULES,
    SCALE as SCALE,
    STOPPED as STOPPED,
    TOTAL as TOTAL,
    UPDATED as UPDATED,
    clip_scales as clip_scales,
    decide_update as decide_update,
    find_overflow as find_overflow,
    layer_scales as layer_scales,
    measure_segments as measure_segments,
    note_loss as note_loss,
    update_segments as update_segments,
)
from .vectors import cast as cast, sum_rows as sum_rows, take as take, transpose as transpose
