"""Goodput under kills, beside torchrun and Lightning: kept steps, relative to those of an undisturbed run.

    python bench/goodput.py [--seconds 300] [--every 30] [--only mpitrain ddp lightning]

Two ranks train ``programs/killed.py``, for 300 s from the first step on. Every 30 s, one of them, chosen at random, is
killed with SIGKILL. An undisturbed run of 30 s before says how many steps there could have been. DDP and Lightning are
started with ``torchrun --max-restarts``, in the environment ``.venv-programs`` of ``make env``.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from environment import one_thread_and_own_kernels, use_this_checkout

use_this_checkout()
from tests.support.launch import LAUNCHER_ENVIRONMENT  # noqa: E402

SCRIPT = Path(__file__).parent / "programs" / "killed.py"
PEERS = Path(__file__).parents[1] / ".venv-programs" / "bin" / "python"
UNDISTURBED_S = 30.0
START_S = 180.0  # time limit for the first step


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--every", type=float, default=30)
    parser.add_argument("--only", nargs="+", default=["mpitrain", "ddp", "lightning"])
    arguments = parser.parse_args()
    one_thread_and_own_kernels()
    print(f"bench/goodput.py, {os.cpu_count()} cores", flush=True)
    for library in arguments.only:
        whole = _train(library, UNDISTURBED_S, UNDISTURBED_S) * arguments.seconds / UNDISTURBED_S
        kept = _train(library, arguments.seconds, arguments.every)
        load = f"load {os.getloadavg()[1]:.1f}"
        print(
            f"{library}: {kept:,} steps kept, {whole:,.0f} undisturbed: {100 * kept / whole:.1f} %; {load}", flush=True
        )


def _train(library: str, seconds: float, every: float) -> int:
    """Train for ``seconds`` from the first step on, with kills ``every`` seconds; return the number of kept steps."""
    with tempfile.TemporaryDirectory() as name, (Path(name) / "output").open("w+") as output:
        folder, chance = Path(name), random.Random(0)
        words = [str(PEERS), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        if library == "mpitrain":
            words = [sys.executable, "-m", "mpitrain", "run", "-n", "2", "--run-dir", str(folder / "run")]
        words += ["--max-restarts", "1000", str(SCRIPT), library, str(folder)]
        step, end, next_kill = 0, time.monotonic() + START_S, 0.0
        environment = {**os.environ, **LAUNCHER_ENVIRONMENT}
        process = subprocess.Popen(words, env=environment, stdout=output, stderr=output, start_new_session=True)
        try:
            while (now := time.monotonic()) < end:
                assert process.poll() is None, (folder / "output").read_text()
                ranks = [(folder / str(rank)).read_text().split() for rank in _ranks(folder)]
                if ranks and not step:
                    end, next_kill = now + seconds, now + every
                step = int(ranks[0][1]) if ranks else 0
                if step and now >= next_kill:
                    with contextlib.suppress(ProcessLookupError):  # the ranks are being started again
                        os.kill(int(chance.choice(ranks)[0]), signal.SIGKILL)
                        next_kill += every
                time.sleep(0.005)
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(60)
        assert step, "no step within the time limit"
        return step


def _ranks(folder: Path) -> list[int]:
    """Return both ranks, once both have completed a step."""
    return [0, 1] if all((folder / str(rank)).exists() for rank in (0, 1)) else []


if __name__ == "__main__":
    main()
