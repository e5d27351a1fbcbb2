"""Run by an interpreter that has CuPy: what can be known of ``mpitrain.cuda.cupy_kernels`` without a GPU.

Prints a line for each of the kernels' sources that NVRTC compiles, with the options that CuPy is given.
"""

import ast
import inspect
import operator
import sys
from pathlib import Path

import cupy
from cupy.cuda import nvrtc

ROOT = Path(__file__).parents[3]


def check_attributes(path: Path) -> None:
    """Every ``cupy.<name>...`` in a module is there."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("cupy."):
            operator.attrgetter(ast.unparse(node).removeprefix("cupy."))(cupy)


def compiled(code: str, name: str, options: tuple[str, ...]) -> bytes:
    """What NVRTC makes of a source."""
    program = nvrtc.createProgram(code, name, (), ())
    try:
        nvrtc.compileProgram(program, options)
    except nvrtc.NVRTCError:
        sys.exit(nvrtc.getProgramLog(program))
    return nvrtc.getCUBIN(program)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    from mpitrain.cuda import cupy_kernels, sources

    check_attributes(Path(inspect.getfile(cupy_kernels)))
    kernels = cupy_kernels.CupyKernels()
    for name in sources.NAMES:
        module = kernels._module(name)  # its arguments are checked; it compiles when a kernel is asked for
        print(name, len(compiled(module.code, f"{name}.cu", (*module.options, f"--gpu-architecture={sys.argv[1]}"))))
