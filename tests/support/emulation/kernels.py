"""Runs the CUDA kernels on the CPU: the same sources, compiled by g++ with ``emulation.hpp`` in front of them."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from mpitrain.gpu import sources

from ..launch import missing

HERE = Path(__file__).parent
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
# Handlers of emulation.cpp are called for every access to memory, and for those that are wrong by themselves.
_CHECKED = [
    "-fsanitize=kernel-address",
    *("--param=asan-instrumentation-with-call-threshold=0", "--param=asan-stack=0", "--param=asan-globals=0"),
    "-fsanitize=alignment,bounds",
]
_KERNEL = re.compile(r'extern "C" __attribute__\(\(noinline\)\) void\s+(\w+)\(')


class EmulatedKernels:
    """A place for ``launch.use`` that runs the emulated library.

    Args:
        library: As ``build`` made it.
        is_reversed: Run the last block and the last thread first.
    """

    def __init__(self, library: Path, is_reversed: bool = False) -> None:
        self._library, self._is_reversed = ctypes.CDLL(str(library)), is_reversed
        self._library.parameters_of.restype = self._library.launch.restype = ctypes.c_char_p

    def empty(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """Memory with bytes in it that make NaN of a float."""
        array = np.empty(shape, dtype)
        array.reshape(-1).view(np.uint8)[...] = 0xFF
        return array

    def launch(self, source: str, name: str, grid: Any, block: Any, arguments: tuple[Any, ...]) -> None:
        """Run a kernel to its end.

        Raises:
            AssertionError: An argument's type is not its parameter's, or the kernel does what it must not.
        """
        assert f"{source}.cu" in [f"{known}.cu" for known in sources.NAMES]
        parameters = self._library.parameters_of(name.encode())
        assert parameters is not None, f"no kernel {name}"
        _check_types(name, parameters.decode().split(), arguments)
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
    """A GPU takes an argument's bytes for whatever the parameter is."""
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


def build(folder: Path, kernels: list[Path]) -> Path:
    """Compile sources of kernels to a shared library; skips the test where there is no g++."""
    if shutil.which("g++") is None:
        missing("g++")
    with ThreadPoolExecutor(2) as pool:
        runtime = pool.submit(_compile, HERE / "emulation.cpp", folder / "emulation.o", [])
        objects = list(pool.map(lambda kernel: _compile_kernels(kernel, folder), kernels))
        objects.append(runtime.result())
    library = folder / "kernels.so"
    _run(["g++", "-shared", "-o", library, *objects])
    return library


def _compile_kernels(source: Path, folder: Path) -> Path:
    """Compile a source with a table of its kernels, whose names are known when its macros have been expanded."""
    included = ["-include", "emulation.hpp", f"-I{source.parent}"]
    names = _KERNEL.findall(_run([*_PLAIN, *included, "-E", "-P", "-x", "c++", source]))
    table = "".join(f'Kernel {name}_("{name}", type_names({name}), call<{name}>);\n' for name in names)
    with_table = folder / f"{source.stem}.cpp"
    with_table.write_text(f'#include "{source}"\nnamespace emulation {{ namespace {{\n{table}}} }}\n')
    return _compile(with_table, folder / f"{source.stem}.o", [*included, *_CHECKED])


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
