"""Files of PyTorch's own tests (FSDP2, checkpoints), on the ranks of mpirun, over this backend and over gloo.

    python bench/torch_files.py FILE [FILE ...] [--ranks 2 4] [--cpu] [--tests PATTERN] [--output FILE]

The files are those of ``test/distributed`` in PyTorch's repository; the wheel does not have them. Their tests start
processes or threads themselves. Here each test runs under ``mpirun``, with the number of ranks that its class requires.
This backend replaces gloo, as in ``bench/torch_suite.py``.

Most of the tests require GPUs, and are skipped without GPUs. With ``--cpu``, these tests run on the CPU. The reported
number of GPUs is then the number of ranks, ``"cuda"`` in the file is read as ``"cpu"``, and ``.cuda()`` and
``device_ids`` do nothing.

Prints JSON: for each file and number of ranks, the numbers of passed, failed and skipped tests, with errors and
reasons, and the tests that gloo passes and this backend does not.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import re
import subprocess
import sys
import time
import types
import unittest
from pathlib import Path
from unittest import mock

import torch_suite

MODULE = "torch_test_file"


def _run_gpu_tests_on_cpu(count: int) -> None:
    """Make the decorators and helpers of PyTorch's tests run tests for at most ``count`` GPUs on the CPU."""
    import torch
    from torch.testing._internal import common_distributed
    from torch.testing._internal.distributed._shard import sharded_tensor
    from torch.testing._internal.distributed._tensor import common_dtensor

    def skip_if_fewer(least: int, **_: object):  # type: ignore[no-untyped-def]
        return unittest.skipIf(least > count, f"asks for {least} devices")

    for module in (common_distributed, common_dtensor):
        module.skip_if_lt_x_gpu = skip_if_fewer  # type: ignore[attr-defined]
    common_distributed.requires_accelerator_dist_backend = lambda *_: lambda test: test
    common_dtensor.NUM_DEVICES = min(4, count)  # type: ignore[misc]
    sharded_tensor.with_comms.__defaults__ = (None, True, "gloo")
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    torch.nn.Module.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]


def load(path: Path, ranks: int, cpu: bool) -> tuple[types.ModuleType, dict[str, int]]:
    """Return the module of a file, and the number of ranks that each of its tests asks for."""
    import torch
    from torch.testing._internal import common_cuda, common_fsdp  # noqa: F401 - imported before the patches

    source = path.read_text()
    if cpu:
        _run_gpu_tests_on_cpu(ranks)
        source = source.replace('"cuda"', '"cpu"').replace("device_ids=[self.rank]", "device_ids=None")
        source = re.sub(r"/\{device_type\}:(\d|\{\w+\})", "/{device_type}", source)  # CPUs have no index in a placement
    module = types.ModuleType(MODULE)
    sys.modules[MODULE] = module
    with mock.patch.object(common_cuda, "TEST_CUDA", cpu):
        exec(compile(source, str(path), "exec"), module.__dict__)
    sizes: dict[str, int] = {}
    devices = ranks if cpu else 0
    for name, test_class in list(vars(module).items()):
        if not (isinstance(test_class, type) and issubclass(test_class, unittest.TestCase)):
            continue
        tests = [test for test in dir(test_class) if test.startswith("test_")]
        if test_class.__module__ != MODULE or not tests:
            continue
        size = 1
        if hasattr(test_class, "world_size"):
            with (
                mock.patch.object(torch.cuda, "device_count", return_value=devices),
                mock.patch.object(torch.cpu, "device_count", return_value=devices),
            ):
                size = int(test_class(tests[0]).world_size)
            test_class.world_size = property(lambda self, size=size: size)  # type: ignore[attr-defined]
        sizes.update({f"{name}.{test}": size for test in tests})
    return module, sizes


def run_tests(backend: str, path: Path, ranks: int, cpu: bool, names: list[str], folder: Path) -> None:
    """Run tests on this rank, and write a line of JSON for each to this rank's file."""
    import traceback
    import warnings

    warnings.simplefilter("ignore")
    from mpitrain.comm.mpi import start

    comm = start()
    rank, size = comm.rank, comm.size
    import torch
    import torch.distributed as dist
    from torch.testing._internal.common_distributed import TEST_SKIPS, MultiThreadedTestCase
    from torch.testing._internal.common_fsdp import FSDPTestMixin
    from torch.testing._internal.common_utils import set_rng_seed

    torch.set_num_threads(1)
    if backend == "mpitrain":
        torch_suite._let_pass_for_gloo()
    module, _ = load(path, ranks, cpu)
    skips = {skip.exit_code: skip.message for skip in TEST_SKIPS.values()}
    with open(folder / f"{rank}.jsonl", "a", buffering=1) as results:
        for name in names:
            results.write(json.dumps({"test": name}) + "\n")
            class_name, method = name.split(".")
            test = getattr(module, class_name)(method)
            test.rank, test.file_name = rank, f"{folder}/store-{comm.bcast(time.time_ns(), root=0)}"
            outcome, text = "passed", ""
            began = time.perf_counter()
            try:
                set_rng_seed()
                if isinstance(test, (FSDPTestMixin, MultiThreadedTestCase)):  # these tests expect a group
                    dist.init_process_group("gloo", init_method=f"file://{test.file_name}", rank=rank, world_size=size)
                    dist.barrier()
                getattr(test, method)()
                if dist.is_initialized():
                    dist.barrier()
            except unittest.SkipTest as skip:
                outcome, text = "skipped", str(skip)
            except SystemExit as end:
                outcome, text = ("skipped", skips[end.code]) if end.code in skips else ("failed", f"exit {end.code}")
            except BaseException as error:
                place = traceback.format_exc()[-1200:]
                outcome, text = "failed", f"{type(error).__name__}: {str(error)[:1500]}\n{place}"
            seconds = time.perf_counter() - began
            results.write(json.dumps({"test": name, "outcome": outcome, "text": text, "s": round(seconds, 2)}) + "\n")
            torch_suite.exit_if_any_failed(comm, outcome == "failed")
            if dist.is_initialized():
                dist.destroy_process_group()


def run_file(backend: str, path: Path, ranks: int, cpu: bool, pattern: str) -> dict[str, dict[str, str]]:
    """Run the tests of a file, each on as many ranks as it asks for; return the outcome of each."""
    program = [sys.executable, str(Path(__file__).resolve()), str(path), *(["--cpu"] if cpu else [])]
    listing = subprocess.run(
        [*program, "--list", "--ranks", str(ranks)], capture_output=True, text=True, check=True, timeout=120
    )
    sizes = json.loads(listing.stdout.splitlines()[-1])
    sizes = {name: size for name, size in sizes.items() if fnmatch.fnmatch(name, pattern)}
    outcomes = {
        name: {"test": name, "outcome": "skipped", "text": f"asks for {size} ranks"}
        for name, size in sizes.items()
        if not 1 <= size <= ranks
    }
    words = [*program[1:], "--ranks", str(ranks), "--rank", backend]
    for size in sorted({size for size in sizes.values() if 1 <= size <= ranks}):
        outcomes |= torch_suite.run_suite(words, size, [name for name in sizes if sizes[name] == size])
    return outcomes


def compare(path: Path, ranks: int, cpu: bool, pattern: str, backends: list[str]) -> dict[str, object]:
    found = {backend: run_file(backend, path, ranks, cpu, pattern) for backend in backends}
    entry: dict[str, object] = {"file": path.name, "ranks": ranks, "cpu": cpu}
    for backend, outcomes in found.items():
        kinds = [outcome["outcome"] for outcome in outcomes.values()]
        entry[backend] = {kind: kinds.count(kind) for kind in ("passed", "failed", "skipped")}
        for kind in ("fail", "skip"):
            entry[f"{backend} {kind}s"] = {n: o["text"] for n, o in outcomes.items() if o["outcome"].startswith(kind)}
        entry[f"{backend} seconds"] = {name: outcome.get("s") for name, outcome in outcomes.items()}
    if len(found) == 2:
        entry["gloo passes and mpitrain does not"] = {
            name: found["mpitrain"][name]["text"]
            for name, outcome in found["gloo"].items()
            if outcome["outcome"] == "passed" and found["mpitrain"][name]["outcome"] != "passed"
        }
    return entry


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--cpu", action="store_true", help="run on the CPU the tests that ask for GPUs")
    parser.add_argument("--backends", nargs="*", default=["mpitrain", "gloo"], choices=["mpitrain", "gloo"])
    parser.add_argument("--tests", default="*", metavar="PATTERN", help="only tests whose Class.test_method matches")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--list", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--rank", nargs=2, metavar=("BACKEND", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        folder = Path(arguments.rank[1])
        names = json.loads((folder / "tests.json").read_text())
        run_tests(arguments.rank[0], arguments.files[0], arguments.ranks[0], arguments.cpu, names, folder)
        return
    if arguments.list:
        print(json.dumps(load(arguments.files[0], arguments.ranks[0], arguments.cpu)[1]))
        return
    report = []
    for path in arguments.files:
        for ranks in arguments.ranks:
            entry = compare(path.resolve(), ranks, arguments.cpu, arguments.tests, arguments.backends)
            report.append(entry)
            print(json.dumps({k: v for k, v in entry.items() if "seconds" not in k}, indent=1), flush=True)
    if arguments.output:
        arguments.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
