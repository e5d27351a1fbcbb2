"""Run by an interpreter that has CuPy: what can be known of ``mpitrain.cuda`` without a GPU.

Prints a line for each of the kernels' sources that NVRTC compiles, with the options that CuPy is given.
"""

import ast
import importlib
import operator
import sys
from pathlib import Path

import cupy
from cupy.cuda import nvrtc

ROOT = Path(__file__).parents[3]


def check_attributes(path: Path) -> None:
    """Every ``cupy.<name>...`` in a module is there, and every attribute of what it imports from CuPy."""
    tree = ast.parse(path.read_text())
    known = {"cupy": "cupy"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("cupy"):
            known |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            first, _, rest = ast.unparse(node).partition(".")
            if first in known and "(" not in rest:
                check(known[first], rest)


def check(module: str, attribute: str) -> None:
    """That a module has an attribute."""
    if module == "cupy_backends.cuda.libs.cublas":  # imports only where cuBLAS is, a large download
        (library,) = (Path(cupy.__file__).parents[1] / "cupy_backends" / "cuda" / "libs").glob("cublas.*.so")
        assert attribute.encode() in library.read_bytes(), attribute
    else:
        operator.attrgetter(attribute)(importlib.import_module(module))


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

    for path in (ROOT / "mpitrain" / "cuda").glob("*.py"):
        check_attributes(path)
    kernels = cupy_kernels.CupyKernels()
    for name in sources.NAMES:
        module = kernels._module(name)  # its arguments are checked; it compiles when a kernel is asked for
        print(name, len(compiled(module.code, f"{name}.cu", (*module.options, f"--gpu-architecture={sys.argv[1]}"))))
