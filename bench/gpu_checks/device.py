"""Print the first GPU of this machine; if there is none, print the reason in one line and exit with status 1.

Run it before a check: ``python bench/gpu_checks/device.py && ...``
"""

from __future__ import annotations

import subprocess
import sys
import time


def main() -> None:
    try:
        import cupy
    except Exception as error:  # a broken installation can raise anything
        sys.exit(f"no NVIDIA GPU: CuPy cannot be imported: {first_line(error)}")
    try:
        cupy.cuda.runtime.getDeviceCount()  # raises an error if there is no GPU
        properties = cupy.cuda.runtime.getDeviceProperties(0)
    except cupy.cuda.runtime.CUDARuntimeError as error:
        sys.exit(f"no NVIDIA GPU: {first_line(error)}")
    print(f"{time.strftime('%Y-%m-%d')}  {properties['name'].decode()}  (driver, clock, power limit: {driver()})")
    print(f"Python {sys.version.split()[0]}, CuPy {cupy.__version__}", flush=True)


def first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def driver() -> str:
    """Return the driver's version, the clock and the power limit."""
    words = ["nvidia-smi", "--query-gpu=driver_version,clocks.max.sm,power.limit", "--format=csv,noheader"]
    try:
        return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return "unknown"


if __name__ == "__main__":
    main()
