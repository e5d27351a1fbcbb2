"""PyTorch's own tests of torch.distributed, on the ranks of mpirun, over this backend and over gloo.

    python bench/torch_suite.py [--ranks 2 3] [--tests PATTERN] [--backends mpitrain gloo] [--output FILE]

The tests are those of ``torch.testing._internal.distributed.distributed_test``, which is a part of PyTorch's wheel.
The tests start processes themselves, and select the backend by name. This harness instead runs the test methods on the
ranks of mpirun, with this backend under the name gloo. Each test has a separate process group. A test that fails or
hangs ends its ranks; new ranks run the remaining tests.

Prints JSON: for each number of ranks, the numbers of passed, failed and skipped tests, the errors, and the tests that
gloo passes and this backend does not.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

TEST_LIMIT_S = 60.0
START_LIMIT_S = 60.0
MODULE = "torch.testing._internal.distributed.distributed_test"


# On a rank.


def _let_pass_for_gloo() -> None:
    """Make PyTorch's interface take and return the name gloo for this backend."""
    import torch
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    new_group, get_backend, init = c10d.new_group, c10d.get_backend, c10d.init_process_group

    def renamed(function):  # type: ignore[no-untyped-def]
        def wrapper(*args, **kwargs):  # type: ignore[no-untyped-def]
            if str(kwargs.get("backend", "")) == "gloo":
                kwargs["backend"] = "mpitrain"
            return function(*(("mpitrain" if arg == "gloo" else arg) for arg in args), **kwargs)

        return wrapper

    replaced = {
        "new_group": renamed(new_group),
        "init_process_group": renamed(init),
        "get_backend": lambda group=None: get_backend(group).replace("mpitrain", "gloo"),
    }
    ddp = torch.nn.parallel.DistributedDataParallel
    data_of = ddp._get_ddp_logging_data
    ddp._get_ddp_logging_data = lambda self: {  # type: ignore[method-assign]
        key: value.replace("mpitrain", "gloo") if key == "backend_name" else value
        for key, value in data_of(self).items()
    }
    for module in (dist, c10d):
        for name, function in replaced.items():
            setattr(module, name, function)


def run_tests(backend: str, names: list[str], folder: Path) -> None:
    """Run tests on this rank, and write a line of JSON for each to this rank's file."""
    import unittest
    import warnings

    warnings.simplefilter("ignore")
    from mpitrain.comm.mpi import start

    comm = start()
    rank, size = comm.rank, comm.size
    os.environ.update(BACKEND="gloo", WORLD_SIZE=str(size), RANK=str(rank), TEMP_DIR=str(folder))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29577")
    import importlib
    from datetime import timedelta

    import torch
    import torch.distributed as dist
    from torch.testing._internal.common_distributed import TEST_SKIPS

    torch.set_num_threads(1)
    tests = importlib.import_module(MODULE)
    if backend == "mpitrain":
        _let_pass_for_gloo()
        # Tests of profiler events expect the events of PyTorch's own backends, by name; other backends have none.
        tests.PROFILING_SUPPORTED_BACKENDS = []  # type: ignore[attr-defined]
        tests.SEND_RECV_PROFILING_SUPPORTED_BACKENDS = []  # type: ignore[attr-defined]
    skips = {skip.exit_code: skip.message for skip in TEST_SKIPS.values()}

    class Suite(tests.TestDistBackend, tests.DistributedTest._DistTestBase):  # type: ignore[misc, name-defined]
        def _barrier(self, *args: object, **kwargs: object) -> None:
            comm.Barrier()

    with open(folder / f"{rank}.jsonl", "a", buffering=1) as results:
        for index, name in enumerate(names):
            results.write(json.dumps({"test": name}) + "\n")
            test = Suite(name)
            test.rank, test.file_name = rank, str(folder / f"store-{index}-{os.getppid()}")
            os.environ["TEMP_DIR"] = str(folder / f"temp-{name}")
            for part in ("barrier", "test_dir", "init_dir"):
                Path(os.environ["TEMP_DIR"], part).mkdir(parents=True, exist_ok=True)
            tests.Barrier.barrier_id = 0
            torch.manual_seed(1234)
            comm.Barrier()
            outcome, text = "passed", ""
            began = time.perf_counter()
            try:
                store = f"file://{folder}/store-{comm.bcast(time.time_ns(), root=0)}"
                seconds = tests.CUSTOM_PG_TIMEOUT.get(name, 30)
                dist.init_process_group(
                    backend, init_method=store, rank=rank, world_size=size, timeout=timedelta(seconds=seconds)
                )
                comm.Barrier()
                getattr(test, name)()
            except unittest.SkipTest as skip:
                outcome, text = "skipped", str(skip)
            except SystemExit as end:
                outcome, text = ("skipped", skips[end.code]) if end.code in skips else ("failed", f"exit {end.code}")
            except BaseException as error:
                outcome, text = "failed", f"{type(error).__name__}: {str(error)[:1500]}"
            seconds = time.perf_counter() - began
            results.write(json.dumps({"test": name, "outcome": outcome, "text": text, "s": round(seconds, 2)}) + "\n")
            exit_if_any_failed(comm, outcome == "failed")
            if dist.is_initialized():
                dist.destroy_process_group()


def exit_if_any_failed(comm: Any, has_failed: bool) -> None:
    """End this rank if the test has failed on any rank: others may still be in an operation. Collective over ``comm``.

    The remaining tests then run on new ranks.
    """
    own, all_ranks = bytearray([has_failed]), bytearray(comm.size)
    request, deadline = comm.Iallgather(own, all_ranks), time.perf_counter() + (5 if has_failed else 1000)
    while not request.Test():
        time.sleep(1e-3)
        if time.perf_counter() > deadline:
            os._exit(1)  # the other ranks hang, because this rank has failed
    if any(all_ranks):
        os._exit(1)


# The program that starts the ranks.


def _launch(words: list[str], ranks: int, names: list[str], folder: Path) -> subprocess.Popen[bytes]:
    (folder / "tests.json").write_text(json.dumps(names))
    launch = [str(Path(sys.executable).parent / "mpirun"), "-n", str(ranks), "--oversubscribe", "--bind-to", "none"]
    settings = {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_mpi_yield_when_idle": "1",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
    }
    log = open(folder / "log.txt", "ab")  # noqa: SIM115
    return subprocess.Popen(
        [*launch, sys.executable, *words, str(folder)],
        env={**os.environ, **settings},
        stdout=log,
        stderr=log,
        start_new_session=True,
    )


def _read(folder: Path, ranks: int) -> list[list[dict[str, str]]]:
    """Return the lines of each rank."""
    found = []
    for rank in range(ranks):
        path = folder / f"{rank}.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        found.append([json.loads(line) for line in lines if line.endswith("}")])
    return found


def run_suite(words: list[str], ranks: int, names: list[str]) -> dict[str, dict[str, str]]:
    """Run the tests on new ranks as often as needed; return the outcome of each.

    Args:
        words: The Python program that runs the tests on a rank, and its arguments, to which a folder is added.
    """
    outcomes: dict[str, dict[str, str]] = {}
    while len(outcomes) < len(names):
        left = [name for name in names if name not in outcomes]
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            process = _launch(words, ranks, left, folder)
            seen, changed, limit = 0, time.monotonic(), START_LIMIT_S
            while process.poll() is None:
                time.sleep(0.2)
                written = sum(path.stat().st_size for path in folder.glob("*.jsonl"))
                if written != seen:
                    seen, changed, limit = written, time.monotonic(), TEST_LIMIT_S
                if time.monotonic() > changed + limit:
                    os.killpg(process.pid, signal.SIGKILL)
                    break
            process.wait()
            hangs = time.monotonic() > changed + limit
            by_rank = _read(folder, ranks)
            for name in left:
                lines = [line for rank in by_rank for line in rank if line["test"] == name and "outcome" in line]
                begun = any(line["test"] == name for rank in by_rank for line in rank)
                failed = next((line for line in lines if line["outcome"] == "failed"), None)
                if failed:
                    outcomes[name] = failed
                elif len(lines) == ranks:
                    outcomes[name] = next((line for line in lines if line["outcome"] == "skipped"), lines[0])
                elif begun or not seen:
                    reason = "hangs" if hangs else f"the ranks ended with status {process.returncode}"
                    log = (folder / "log.txt").read_text(errors="replace")[-600:]
                    outcomes[name] = {"test": name, "outcome": "failed", "text": f"{reason}: {log}"}
                    break
    return outcomes


def test_names(pattern: str) -> list[str]:
    """Return the names of the test methods that match a pattern."""
    os.environ.update(BACKEND="gloo", WORLD_SIZE="4")
    import importlib

    suite = importlib.import_module(MODULE).DistributedTest._DistTestBase
    return sorted(name for name in dir(suite) if name.startswith("test_") and fnmatch.fnmatch(name, pattern))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 3])
    parser.add_argument("--backends", nargs="*", default=["mpitrain", "gloo"], choices=["mpitrain", "gloo"])
    parser.add_argument("--tests", default="test_*", metavar="PATTERN")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--rank", nargs=2, metavar=("BACKEND", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        folder = Path(arguments.rank[1])
        run_tests(arguments.rank[0], json.loads((folder / "tests.json").read_text()), folder)
        return
    names = test_names(arguments.tests)
    report = []
    for ranks in arguments.ranks:
        own = str(Path(__file__).resolve())
        found = {backend: run_suite([own, "--rank", backend], ranks, names) for backend in arguments.backends}
        entry: dict[str, object] = {"ranks": ranks, "tests": len(names)}
        for backend, outcomes in found.items():
            kinds = [outcome["outcome"] for outcome in outcomes.values()]
            entry[backend] = {kind: kinds.count(kind) for kind in ("passed", "failed", "skipped")}
            entry[f"{backend} fails"] = {n: o["text"][:300] for n, o in outcomes.items() if o["outcome"] == "failed"}
        if len(found) == 2:
            entry["gloo passes and mpitrain does not"] = {
                name: found["mpitrain"][name]["text"][:600]
                for name in names
                if found["gloo"][name]["outcome"] == "passed" and found["mpitrain"][name]["outcome"] != "passed"
            }
        report.append(entry)
        print(json.dumps(entry, indent=1), flush=True)
    if arguments.output:
        arguments.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
