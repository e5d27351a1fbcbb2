"""nvcc compiles the sources of the kernels for three generations of GPUs, and NVRTC for one; no GPU is needed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mpitrain.gpu import sources
from tests.support.launch import ROOT, missing

from ...simulators.emulation.kernels import write_sources
from ...simulators.simulated_gpus import KERNELS

pytestmark = pytest.mark.full
ENVIRONMENT = ROOT / ".venv-nvcc"
# A thread has the same number of registers on all architectures. All types are therefore compiled for one architecture,
# and only a few for the others.
ARCHITECTURES = {"sm_80": ["Float16"], "sm_90": sources.ALL, "sm_100": ["float"]}
LARGEST_FIRST = sorted(
    ((name, stored) for name, types in sources.TYPES.items() for stored in types),
    key=lambda pair: -(KERNELS / f"{pair[0]}.cu").stat().st_size,
)


@pytest.fixture(scope="module")
def nvcc() -> str:
    """The path of nvcc: from $PATH, from $CUDA_HOME, or from the environment that ``make env`` makes."""
    folders = [os.environ.get("PATH", ""), os.path.join(os.environ.get("CUDA_HOME", ""), "bin")]
    folders += [str(folder) for folder in ENVIRONMENT.glob("lib/python*/site-packages/nvidia/cu*/bin")]
    found = shutil.which("nvcc", path=os.pathsep.join(folders))
    if found is None:
        missing("nvcc; 'make env' installs it")
    assert found is not None
    return found


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_nvcc_compiles_without_a_warning_and_spills_nothing(nvcc: str, architecture: str, tmp_path: Path) -> None:
    def compiled(pair: tuple[str, str]) -> subprocess.CompletedProcess[str]:
        name, stored = pair
        words = [nvcc, "-std=c++17", f"-DSTORED={stored}", "-Werror", "all-warnings", f"-arch={architecture}"]
        words += ["-Xptxas", "-v", "-cubin", "-o", str(tmp_path / f"{name}_{stored}"), str(tmp_path / f"{name}.cu")]
        return subprocess.run(words, capture_output=True, text=True)

    write_sources(tmp_path)
    pairs = [pair for pair in LARGEST_FIRST if pair[1] in ARCHITECTURES[architecture]]
    with ThreadPoolExecutor(2) as pool:
        for name, done in zip(pairs, pool.map(compiled, pairs), strict=True):
            output = done.stdout + done.stderr
            assert done.returncode == 0, output
            spills = re.findall(r"(\d+) bytes spill stores", output)
            assert spills and set(spills) == {"0"}, f"{name}: {output}"


def test_every_source_is_known() -> None:
    assert sorted(sources.TYPES) == sorted(path.stem for path in KERNELS.glob("*.cu"))
    for name in sources.TYPES:
        text = sources.text(name)
        assert "#include" not in text
        number = int(re.search(r'#line (\d+) "', text)[1])  # type: ignore[index]
        after = text.split(f'#line {number} "{name}.cu"\n')[1].splitlines()
        assert (KERNELS / f"{name}.cu").read_text().splitlines()[number - 1] == after[0]


@pytest.mark.parametrize("architecture", ["sm_90"])
def test_nvrtc_compiles_and_cupy_has_what_is_asked_of_it(architecture: str) -> None:
    python = ENVIRONMENT / "bin" / "python"
    if not python.exists():
        missing("an environment with CuPy; 'make env' makes it")
    words = [str(python), str(ROOT / "tests" / "simulators" / "compile_with_cupy.py"), architecture]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert sum(words[0] == "checked" for words in lines) == 9  # classes of the simulator
    compiled = {(name, stored) for name, stored, *_ in lines if name != "checked"}
    assert compiled == {(name, stored) for name, types in sources.TYPES.items() for stored in types}
