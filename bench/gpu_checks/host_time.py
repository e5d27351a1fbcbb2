"""Print where a training step spends its time in Python: calls and microseconds per step of the slowest functions.

    python3 bench/gpu_checks/host_time.py [--model mlp1024] [--steps 500] [--device gpu]

Profiles a run of a module of ``bench/jobs/torch_models.py`` twice, the second time with three times as many steps. The
differences are divided by the number of additional steps, so that start-up does not count. The profiler makes Python
calls slower, so only the order of the functions is meaningful. Functions in threads that PyTorch starts are not
included.
"""

from __future__ import annotations

import argparse
import pstats
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def profile(model: str, device: str, steps: int, folder: Path) -> dict[Any, Any]:
    """Return calls and seconds of each function in a run of this number of steps."""
    output = folder / f"{steps}.profile"
    words = ["-m", "cProfile", "-o", str(output), "-m", "mpitrain", "train", str(ROOT / "bench/jobs/torch_models.py")]
    flags = ["--model", model, "--device", device, "--train-steps", str(steps), "--log-steps", "0"]
    flags += ["--threads", "1", "--no-tensorboard", "--run-dir", str(folder / f"run-{steps}")]
    subprocess.run([sys.executable, *words, *flags], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return pstats.Stats(str(output)).stats  # type: ignore[attr-defined, no-any-return]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="mlp1024")
    parser.add_argument("--device", default="gpu")
    parser.add_argument("--steps", type=int, default=500)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        few, many = (
            profile(arguments.model, arguments.device, steps, Path(name))
            for steps in (arguments.steps, 3 * arguments.steps)
        )
    nothing = (0, 0, 0.0, 0.0, {})
    rows = []
    for function, (_, calls, own, whole, _) in many.items():
        _, calls_before, own_before, whole_before, _ = few.get(function, nothing)
        rows.append((own - own_before, whole - whole_before, calls - calls_before, function))
    steps = 2 * arguments.steps
    print("own us  with callees  calls  function, per step")
    for own, whole, calls, (file, line, name) in sorted(rows, key=lambda row: row[0], reverse=True)[:40]:
        where = f"{'/'.join(Path(file).parts[-2:])}:{line} " if line else ""
        print(f"{own / steps * 1e6:6.1f}  {whole / steps * 1e6:12.1f}  {calls / steps:5.1f}  {where}{name}")


if __name__ == "__main__":
    main()
