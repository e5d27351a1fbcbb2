"""Measure the bandwidth of the kernels of ``mpitrain.gpu.ops`` on large arrays, relative to a copy on the GPU.

    python bench/gpu_checks/kernels.py [float32] [bfloat16] [float16] [--small]

An array counts once if a kernel reads or writes it, and twice if it does both. Each line is printed at once. Optimizer
updates are in ``bench/gpu.py update``. ``--small`` only checks that everything runs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from environment import require_gpu, use_this_checkout
from gpu import seconds_of

ROWS, COLUMNS, IMAGES = 65_536, 1024, 2048
DTYPES = ("float32", "bfloat16", "float16")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dtypes", nargs="*", metavar="DTYPE", help=f"{', '.join(DTYPES)}; all by default")
    parser.add_argument("--small", action="store_true")
    arguments = parser.parse_args()
    for dtype in arguments.dtypes:
        if dtype not in DTYPES:
            parser.error(f"{dtype} is not one of {', '.join(DTYPES)}")
    use_this_checkout()
    require_gpu()
    import ml_dtypes

    from mpitrain.gpu.device import Gpu

    gpu = Gpu(0, 0.9)
    size, rounds = ((64, 64, 1), 1) if arguments.small else ((ROWS, COLUMNS, IMAGES), 20)
    with gpu.activate():
        source, target = (gpu.zeros((size[0] * size[1],), np.float32) for _ in range(2))
        copied = 2 * source.nbytes / seconds_of(gpu, lambda: gpu.compute.copy(source, target), rounds)
        print(f"{'copy':40} {copied / 1e9:8,.0f} GB/s", flush=True)
        for name in arguments.dtypes or DTYPES:
            dtype = np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)
            for title, moved, work in (*dense(gpu, dtype, *size[:2]), *spatial(gpu, dtype, size[2])):
                rate = sum(array.nbytes for array in moved) / seconds_of(gpu, work, rounds)
                print(f"{title:29} {name:10} {rate / 1e9:8,.0f} GB/s  {rate / copied:4.0%} of a copy", flush=True)


Case = tuple[str, list[Any], Callable[[], object]]  # title, the arrays that count, and the call


def dense(gpu: Any, dtype: Any, rows: int, columns: int) -> Iterator[Case]:
    """Yield kernels on matrices."""
    from mpitrain.gpu import ops

    x, y, dy = (gpu.zeros((rows, columns), dtype) for _ in range(3))
    real, double = np.float32, np.float64
    wide, turned = gpu.zeros((rows, columns), real), gpu.zeros((columns, rows), dtype)
    center, sums = gpu.zeros((2, columns), real), gpu.zeros((2, columns), double)
    moments = gpu.zeros((3, columns), double)
    bias, inverse, scale, of_rows = (gpu.zeros((n,), real) for n in (columns, columns, columns, rows))
    position, labels = gpu.zeros((1,), np.uint64), gpu.zeros((rows,), np.int32)
    order = gpu.copy_of(np.random.default_rng(0).permutation(rows))

    def buffer(name: str, shape: Any) -> Any:
        return y

    for kind in ("relu", "gelu"):
        kept = x if kind == "gelu" else y
        yield f"activate {kind}", [x, y], lambda kind=kind: ops.activate(x, kind, 0.0, False, buffer)
        yield (
            f"activate_backward {kind}",
            [kept, dy, dy],
            lambda kind=kind, kept=kept: ops.activate_backward(kept, kind, 0.0, dy),
        )
    yield "add", [x, y, dy], lambda: ops.add(x, y, dy)
    yield "add_bias relu", [x, x], lambda: ops.add_bias(x, bias, "relu", 0.0, buffer)
    yield "add_bias_backward relu", [y, dy, dy], lambda: ops.add_bias_backward(y, "relu", 0.0, dy, bias)
    yield "take_rows", [wide, y], lambda: ops.take_rows(wide, order, y)
    yield "drop", [x, y], lambda: ops.drop(x, y, 1, 2, position, 1 << 31, 2.0)
    yield "moments", [x], lambda: ops.moments(x, moments)
    yield "normalize", [x, y], lambda: ops.normalize(x, center, inverse, scale, bias, y)
    yield "gradient_sums", [x, dy], lambda: ops.gradient_sums(x, center, inverse, dy, sums)
    yield "normalize_backward", [x, dy, dy], lambda: ops.normalize_backward(x, center, inverse, scale, sums, dy)
    yield "layer_norm", [x, y, dy], lambda: ops.layer_norm(x, 1e-5, scale, bias, y, of_rows, dy)
    yield "layer_norm_backward", [x, dy, dy], lambda: ops.layer_norm_backward(x, of_rows, scale, dy, sums)
    yield "softmax_gradient", [x, y], lambda: ops.softmax_gradient(x, labels, 1.0, y, None)
    yield "softmax_evaluate", [x], lambda: ops.softmax_evaluate(x, labels)
    yield "sigmoid_gradient", [x, wide, y], lambda: ops.sigmoid_gradient(x, wide, 1.0, y, None)
    yield "square_gradient", [x, wide, y], lambda: ops.square_gradient(x, wide, 1.0, y, None)
    yield "transpose", [wide, turned], lambda: ops.transpose(wide, turned)
    if dtype == real:
        pixels, parts, in_order = gpu.zeros((rows, columns), np.uint8), x.reshape(4, -1), gpu.copy_of(np.arange(4))
        total = y.reshape(4, -1)[0]
        yield "take from bytes", [pixels, y], lambda: ops.take(pixels, order, 1 / 255, y)
        yield "sum_rows of 4", [x, total], lambda: ops.sum_rows(parts, in_order, 0, total.size, 1.0, total)
    else:
        yield "cast from float32", [wide, x], lambda: ops.cast(wide, x)
        yield "cast to float32", [x, wide], lambda: ops.cast(x, wide)


def spatial(gpu: Any, dtype: Any, images: int) -> Iterator[Case]:
    """Yield kernels on images, of the sizes of ``fashion_cnn``."""
    from mpitrain.gpu import ops

    x, y = gpu.zeros((images, 28, 28, 32), dtype), gpu.zeros((images, 14, 14, 32), dtype)
    place, windows = gpu.zeros(y.shape, np.uint8), gpu.zeros((images, 14, 14, 9 * 32), dtype)
    padded = gpu.zeros((images, 16, 16, 32), dtype)
    yield "max_pool", [x, y, place], lambda: ops.max_pool(x, 2, 2, y, place)
    yield "max_pool_backward", [y, place, x], lambda: ops.max_pool_backward(y, place, 2, 2, x)
    yield "average_pool", [x, y], lambda: ops.average_pool(x, 2, 2, y)
    yield "average_pool_backward", [y, x], lambda: ops.average_pool_backward(y, 2, 2, x)
    yield "copy_windows", [padded, windows], lambda: ops.copy_windows(padded, 0, 1, 1, 3, 3, windows)
    yield "add_windows", [windows, padded, padded], lambda: ops.add_windows(windows, 0, 1, 1, 3, 3, padded)


if __name__ == "__main__":
    main()
