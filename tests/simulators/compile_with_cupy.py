"""Checks of ``mpitrain.gpu`` that need CuPy but no GPU; run by an interpreter that has CuPy.

NVRTC compiles each source of kernels for each type, with the options that CuPy gets; a line is printed for each.
"""

import ast
import importlib
import importlib.util
import operator
import sys
from pathlib import Path

import cupy
from cupy.cuda import nvrtc

ROOT = Path(__file__).parents[2]
OF_THE_STAND_IN = {"here"}


def check_attributes(path: Path) -> None:
    """Check that CuPy has every name ``cupy.<name>...`` in a file, and attributes of the file's imports from CuPy."""
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
    """Check that a module has an attribute."""
    # These two modules can be imported only with their libraries, which are large downloads.
    library = {"cupy_backends.cuda.libs.cublas": "cublas", "cupy.cuda.nccl": "nccl"}.get(module)
    if library is not None and attribute != "available":
        (file,) = (Path(cupy.__file__).parents[1] / "cupy_backends" / "cuda" / "libs").glob(f"{library}.*.so")
        assert attribute.encode() in file.read_bytes(), attribute
    else:
        operator.attrgetter(attribute)(importlib.import_module(module))


def check_stand_in(path: Path) -> None:
    """Check that CuPy's classes have all methods of the simulated classes of the same name."""
    name = ".".join(path.relative_to(ROOT / "tests" / "simulators" / "gpu").with_suffix("").parts).removesuffix(
        ".__init__"
    )
    if importlib.util.find_spec(name) is None or name == "cupy.cuda.nccl":
        return
    module = importlib.import_module(name)
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef) and hasattr(module, node.name):
            methods = [each.name for each in node.body if isinstance(each, ast.FunctionDef)]
            for method in methods:
                own = method.startswith("_") or method in OF_THE_STAND_IN
                assert own or hasattr(getattr(module, node.name), method), f"{name}.{node.name}.{method}"
            print("checked", name, node.name)


def compiled(code: str, name: str, options: tuple[str, ...]) -> bytes:
    """Return the cubin that NVRTC makes of a source; exit with the compiler's log if it fails."""
    program = nvrtc.createProgram(code, name, (), ())
    try:
        nvrtc.compileProgram(program, options)
    except nvrtc.NVRTCError:
        sys.exit(nvrtc.getProgramLog(program))
    return nvrtc.getCUBIN(program)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    from mpitrain.gpu import nvrtc as cupy_kernels, sources

    for path in (ROOT / "mpitrain" / "gpu").glob("*.py"):
        check_attributes(path)
    for path in (ROOT / "tests" / "simulators" / "gpu" / "cupy").rglob("*.py"):
        check_stand_in(path)
    kernels = cupy_kernels.CupyKernels()
    for name, types in sources.TYPES.items():
        for stored in types:
            module = kernels._module(name, stored)  # CuPy checks arguments here, and compiles later, on a GPU
            options = *module.options, f"--gpu-architecture={sys.argv[1]}"
            print(name, stored, len(compiled(module.code, f"{name}.cu", options)))
