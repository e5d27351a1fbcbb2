"""Runs the CUDA kernels on the CPU: the same sources, compiled by g++ with ``emulation.hpp`` in front of them."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from mpitrain.gpu import sources
from mpitrain.gpu.ops import Kernel
from mpitrain.gpu.ops.grid import THREADS

from ...support.launch import missing

HERE = Path(__file__).parent
KERNELS = Path(sources.__file__).parent / "kernels"
_PLAIN = [
    "g++",
    "-std=c++20",
    "-O1",
    "-fPIC",
    "-ffp-contract=off",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-Wno-unknown-pragmas",
    f"-I{HERE}",
]
# With these flags, handlers in emulation.cpp are called for every memory access, and for misaligned accesses and for
# indices outside a C array.
_CHECKED = [
    "-fsanitize=kernel-address",
    *("--param=asan-instrumentation-with-call-threshold=0", "--param=asan-stack=0", "--param=asan-globals=0"),
    "-fsanitize=alignment,bounds",
]
_KERNEL = re.compile(r'extern "C" __attribute__\(\(noinline\)\) void\s+(\w+)\s*\(')


class EmulatedKernels:
    """An argument for ``launch.use``, with which kernels run on the CPU.

    Args:
        library: The result of ``build``.
        is_reversed: Whether to run the last block and the last thread first.
        resident: Value of ``resident_blocks`` for every kernel.
    """

    def __init__(self, library: Path, is_reversed: bool = False, resident: int = 1000) -> None:
        self._library, self._is_reversed, self._resident = ctypes.CDLL(str(library)), is_reversed, resident
        self._library.parameters_of.restype = self._library.launch.restype = ctypes.c_char_p

    def empty(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """Return an array whose bytes are all 0xFF; as floats, these are NaN."""
        array = np.empty(shape, dtype)
        array.reshape(-1).view(np.uint8)[...] = 0xFF
        return array

    def resident_blocks(self, kernel: Kernel) -> int:
        return self._resident

    def launch(self, kernel: Kernel, grid: Any, block: Any, arguments: tuple[Any, ...]) -> None:
        """Run a kernel to its end.

        Raises:
            AssertionError: An argument has the wrong type, or the kernel has an error, such as an access out of bounds.
        """
        assert kernel.stored in sources.TYPES[kernel.source]
        assert 0 < grid[0] < 2**31 and 0 < grid[1] < 2**16, f"{kernel.name}: grid {grid}"
        assert 0 < block[0] * block[1] <= THREADS, f"{kernel.name}: block {block}, but it is compiled for {THREADS}"
        name = f"{kernel.name}_{kernel.stored}"
        parameters = self._library.parameters_of(name.encode())
        assert parameters is not None, f"no kernel {name}"
        _check_types(name, parameters.decode().lower().split(), arguments)
        arrays = [argument for argument in arguments if isinstance(argument, np.ndarray)]
        bounds = [end for array in arrays for end in (array.ctypes.data, array.ctypes.data + array.nbytes)]
        wrong = self._library.launch(
            name.encode(),
            (ctypes.c_uint * 4)(*grid, *block),
            int(self._is_reversed),
            len(arguments),
            (ctypes.c_ulonglong * len(arguments))(*map(_word, arguments)),
            len(arrays),
            (ctypes.c_void_p * len(bounds))(*bounds),
        )
        assert wrong is None, f"{name}: {wrong.decode()}"


def _check_types(name: str, parameters: list[str], arguments: tuple[Any, ...]) -> None:
    """Check the types, because a GPU interprets an argument's bytes as the parameter's type."""
    assert len(parameters) == len(arguments), name
    for place, (parameter, argument) in enumerate(zip(parameters, arguments, strict=True)):
        mismatch = f"{name}, argument {place}: {type(argument)}, not {parameter}"
        if isinstance(argument, np.ndarray):
            assert parameter in ("*any", f"*{argument.dtype.name}"), mismatch
        elif parameter.startswith("*"):
            assert isinstance(argument, np.uint64) and argument == 0, mismatch
        else:
            assert isinstance(argument, np.generic) and argument.dtype.name == parameter, mismatch


def _word(argument: Any) -> int:
    if isinstance(argument, np.ndarray):
        return int(argument.ctypes.data)
    return int.from_bytes(argument.tobytes().ljust(8, b"\0"), "little")


def write_sources(folder: Path) -> dict[Path, Sequence[str]]:
    """Write all sources and their header; return the types for which each source can be compiled."""
    shutil.copy(KERNELS / "common.cuh", folder)
    for name in sources.TYPES:
        (folder / f"{name}.cu").write_text(sources.source(name))
    return {folder / f"{name}.cu": types for name, types in sources.TYPES.items()}


def build(folder: Path, kernels: dict[Path, Sequence[str]]) -> Path:
    """Compile kernel sources, each for the given types, to a shared library. Skips the test if there is no g++."""
    if shutil.which("g++") is None:
        missing("g++")
    with ThreadPoolExecutor(2) as pool:
        runtime = pool.submit(_compile, HERE / "emulation.cpp", folder / "emulation.o", [])
        pairs = [(source, stored) for source, types in kernels.items() for stored in types]
        objects = list(pool.map(lambda pair: _compile_kernels(*pair, folder), pairs))
        objects.append(runtime.result())
    library = folder / "kernels.so"
    _run(["g++", "-shared", "-o", library, *objects])
    return library


def _compile_kernels(source: Path, stored: str, folder: Path) -> Path:
    """Compile a source for a type, with a table of its kernels.

    The preprocessor's output has the names of the kernels. A namespace per type avoids conflicting definitions.
    """
    included = ["-include", "emulation.hpp", f"-I{source.parent}", f"-DSTORED={stored}"]
    names = _KERNEL.findall(_run([*_PLAIN, *included, "-E", "-P", "-x", "c++", source]))
    table = "".join(f'Kernel {name}_("{name}", type_names({name}), call<{name}>);\n' for name in names)
    with_table = folder / f"{source.stem}_{stored}.cpp"
    with_table.write_text(
        f'namespace of_{stored} {{\n#include "{source}"\nnamespace {{ using namespace emulation;\n{table}}} }}\n'
    )
    return _compile(with_table, with_table.with_suffix(".o"), [*included, *_CHECKED])


def _compile(source: Path, target: Path, flags: list[str]) -> Path:
    _run([*_PLAIN, *flags, "-c", source, "-o", target])
    return target


def _run(words: list[Any]) -> str:
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:5000]
    return done.stdout


def put(array: np.ndarray, shift: int) -> np.ndarray:
    there = np.empty(array.size + shift, array.dtype)[shift:].reshape(array.shape)
    there[...] = array
    return there
