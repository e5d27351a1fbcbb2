"""Registers, spills, shared memory, resident blocks and instructions of the compiled GPU kernels. Needs no GPU.

    python bench/gpu_kernels.py [NAME ...] [--all] [--arch sm_90] [--baseline DIR]

Without names, the script prints the kernels that move the most bytes in a training step, with their megabytes per step.
The step is of fashion_cnn (batch 512, float32, no cuDNN) or of the wide MLP of gpu.py (batch 8192, bfloat16). Every
array that a kernel reads or writes counts once, because further reads come from a cache. A column shows this checkout's
value, or ``baseline -> this``.

Resident blocks are blocks of 256 threads that a multiprocessor with 64 Ki registers runs at once. Instructions are
counted in the compiled code (16 bytes each), not during execution.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from environment import ROOT

MEGABYTES = {
    "update_segments_adam_float": 940,
    "copy_windows_float": 281,
    "add_bias_Bfloat16": 268,
    "add_bias_backward_Bfloat16": 268,
    "add_bias_backward_float": 231,
    "cast_from_float_Bfloat16": 201,
    "add_bias_float": 154,
    "add_windows_float": 149,
    "softmax_gradient_Bfloat16": 134,
    "max_pool_float": 101,
    "max_pool_backward_float": 101,
    "take_Bfloat16": 101,
}
OLD_NAMES = {"cast_from_float_Bfloat16": "cast_float_Bfloat16", "take_Bfloat16": "take_uint8_float"}
SHARED = {"sm_80": 164, "sm_86": 100, "sm_89": 100, "sm_90": 228, "sm_100": 228}  # KiB of a multiprocessor
_FIGURES = re.compile(
    r"entry function '(\w+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers"
    r"(?:[^\n]*?(\d+) bytes smem)?",
    re.DOTALL,
)

# Prints the sources of the checkout in the current folder, each with the types for which it can be compiled.
_SOURCES = """
import json
from mpitrain.gpu import sources
print(json.dumps({name: {"types": types, "text": sources.text(name)} for name, types in sources.TYPES.items()}))
"""


class Figures(NamedTuple):
    registers: int
    spilled: int  # bytes of stores and loads
    shared: int  # bytes per block
    blocks: int
    instructions: int


def compiled(checkout: Path, arch: str) -> dict[str, Figures]:
    """Compile all kernels of a checkout for all types."""
    done = subprocess.run([sys.executable, "-c", _SOURCES], cwd=checkout, stdout=subprocess.PIPE, check=True)
    sources = json.loads(done.stdout)

    def compile_source(pair: tuple[str, str]) -> dict[str, Figures]:
        name, stored = pair
        cubin = Path(output) / f"{name}_{stored}.cubin"
        words = [nvcc(), "-std=c++17", f"-DSTORED={stored}", f"-arch={arch}", "-Xptxas", "-v", "-cubin"]
        source = cubin.with_suffix(".cu")
        source.write_text(sources[name]["text"])
        done = subprocess.run([*words, "-o", str(cubin), str(source)], capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stderr)
        lengths = dict(code_bytes(cubin.read_bytes()))
        return {
            kernel: figures(arch, int(registers), int(stores) + int(loads), int(shared or 0), lengths[kernel] // 16)
            for kernel, stores, loads, registers, shared in _FIGURES.findall(done.stdout + done.stderr)
        }

    with tempfile.TemporaryDirectory() as output, ThreadPoolExecutor() as pool:
        pairs = [(name, stored) for name, source in sources.items() for stored in source["types"]]
        return {kernel: found for part in pool.map(compile_source, pairs) for kernel, found in part.items()}


def figures(arch: str, registers: int, spilled: int, shared: int, instructions: int) -> Figures:
    by_registers = 65536 // (-(-registers // 8) * 8 * 256)  # registers are allocated in units of 8 per thread
    by_shared = SHARED[arch] * 1024 // (shared + 1024)  # CUDA reserves 1 KiB per block
    return Figures(registers, spilled, shared, min(8, by_registers, by_shared), instructions)


def code_bytes(cubin: bytes) -> Iterator[tuple[str, int]]:
    """Yield the name of each kernel of an ELF file, and the size of its section ``.text.<kernel>`` in bytes."""
    (table,), (size, count, names) = struct.unpack_from("<Q", cubin, 40), struct.unpack_from("<HHH", cubin, 58)
    sections = [struct.unpack_from("<IIQQQQ", cubin, table + i * size) for i in range(count)]
    for name, _, _, _, _, length in sections:
        start = sections[names][4] + name
        text = cubin[start : cubin.index(b"\0", start)].decode()
        if text.startswith(".text."):
            yield text.removeprefix(".text."), length


def nvcc() -> str:
    """Return the path of nvcc in PATH, in $CUDA_HOME, or in the environment that ``make env`` creates."""
    folders = [os.environ.get("PATH", ""), os.path.join(os.environ.get("CUDA_HOME", ""), "bin")]
    folders += map(str, ROOT.glob(".venv-nvcc/lib/python*/site-packages/nvidia/cu*/bin"))
    found = shutil.which("nvcc", path=os.pathsep.join(folders))
    return found or sys.exit("nvcc was not found; put it on the PATH or run 'make env'")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="kernels with their type, such as drop_float")
    parser.add_argument("--all", action="store_true", help="print all kernels")
    parser.add_argument("--arch", default="sm_90", choices=SHARED)
    parser.add_argument("--baseline", type=Path, help="another checkout, to compare with")
    arguments = parser.parse_args()
    if arguments.baseline and not (arguments.baseline / "mpitrain" / "gpu" / "sources.py").exists():
        parser.error(f"--baseline {arguments.baseline} is not a checkout: it has no mpitrain/gpu/sources.py")
    checkouts = [ROOT] if arguments.baseline is None else [arguments.baseline, ROOT]
    all_found = [compiled(checkout, arguments.arch) for checkout in checkouts]
    known = sorted(set().union(*all_found))
    names = known if arguments.all else arguments.names or list(MEGABYTES)
    if unknown := sorted(set(names) - set(known)):
        parser.error(f"no kernel is named {unknown[0]!r}; --all prints all names")
    print_table(names, all_found)
    for checkout, found in zip(checkouts, all_found, strict=True):
        print_summary(checkout, found)


def print_table(names: list[str], all_found: list[dict[str, Figures]]) -> None:
    """Print a line per kernel."""
    print(f"{'':36}{'MB':>5}" + "".join(f"{column:>16}" for column in Figures._fields))
    for name in names:
        both = [found.get(name) or found.get(OLD_NAMES.get(name, "")) for found in all_found]
        cells = (" -> ".join("-" if one is None else str(one[i]) for one in both) for i in range(len(Figures._fields)))
        print(f"{name:36}{MEGABYTES.get(name, ''):>5}" + "".join(f"{cell:>16}" for cell in cells))


def print_summary(checkout: Path, found: dict[str, Figures]) -> None:
    """Print a checkout's numbers of lines, kernels, and kernels that spill."""
    files = (checkout / "mpitrain" / "gpu" / "kernels").iterdir()
    lines = [line.strip() for file in files for line in file.read_text().splitlines()]
    code = [line for line in lines if line and not line.startswith("//")]
    kernels = {re.sub("(_(float|double|B?[Ff]loat16|u?int[0-9]+|float[0-9]+))+$", "", name) for name in found}
    print(
        f"{checkout}: {len(lines)} lines, {len(code)} without comments and empty lines; {len(kernels)} kernels, "
        f"{len(found)} with all types, {sum(one.spilled > 0 for one in found.values())} of which spill"
    )


if __name__ == "__main__":
    main()
