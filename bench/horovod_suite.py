"""Horovod's own tests of its PyTorch API, on the ranks of mpirun, over mpitrain.horovod.

    python bench/horovod_suite.py --tests DIR [--ranks 2 3] [--files test_torch.py] [--pattern PATTERN] [--output FILE]

DIR is a copy of Horovod's repository, of which only ``test`` is needed. The tests are not changed, except for the lines
that import Horovod. The helpers of the tests import a module of Horovod's launcher and the package ``mock``; both are
replaced. Muon is hidden from tests that take all optimizers of PyTorch: it is newer than the tests, and refuses their
models. A test that fails or hangs ends its ranks; new ranks run the remaining tests.

Prints JSON: for each file and number of ranks, the numbers of passed, failed and skipped tests, with errors and
reasons.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import re
import sys
import threading
import time
import types
from collections import Counter
from pathlib import Path

from torch_suite import exit_if_any_failed, run_suite

FILES = ("test_torch.py", "test_adasum_pytorch.py")
_IMPORT = re.compile(r"^(\s*)(import|from) horovod\.torch\b", re.MULTILINE)


def _replace_helpers() -> None:
    """Provide the modules that the tests' helpers import."""
    from unittest import mock

    def in_thread(target, args=(), daemon=True):  # type: ignore[no-untyped-def]
        thread = threading.Thread(target=target, args=args, daemon=daemon)
        thread.start()
        return thread

    for name in ("horovod", "horovod.runner", "horovod.runner.util", "horovod.runner.util.threads"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules["horovod.runner.util.threads"].in_thread = in_thread  # type: ignore[attr-defined]
    sys.modules["mock"] = mock


def _load(path: Path) -> types.ModuleType:
    """Return a test file as a module that imports ``mpitrain.horovod.torch`` in place of ``horovod.torch``."""
    _replace_helpers()
    module = types.ModuleType(path.stem)
    module.__file__ = str(path)
    source = _IMPORT.sub(r"\1\2 mpitrain.horovod.torch", path.read_text())
    exec(compile(source, str(path), "exec"), vars(module))
    return module


def _tests_of(module: types.ModuleType) -> dict[str, tuple[type, str]]:
    import unittest

    cases = [
        value for value in vars(module).values() if isinstance(value, type) and issubclass(value, unittest.TestCase)
    ]
    return {name: (case, name) for case in cases for name in unittest.TestLoader().getTestCaseNames(case)}


def run_tests(path: Path, names: list[str], folder: Path) -> None:
    """Run tests on this rank, and write a line of JSON for each to this rank's file."""
    import unittest
    import warnings

    import torch

    from mpitrain.comm.mpi import start

    comm = start()
    torch.set_num_threads(1)
    if hasattr(torch.optim, "Muon"):
        torch.optim.Muon.__module__ = "hidden"  # the tests find optimizers by their module
    tests = _tests_of(_load(path))
    warnings.simplefilter("ignore")
    with open(folder / f"{comm.rank}.jsonl", "a", buffering=1) as results:
        for name in names:
            results.write(json.dumps({"test": name}) + "\n")
            case, method = tests[name]
            result = unittest.TestResult()
            comm.Barrier()
            began = time.perf_counter()
            case(method).run(result)
            problems = [text for _, text in result.failures + result.errors]
            outcome = "failed" if problems else "skipped" if result.skipped else "passed"
            text = "".join(problems)[-1500:] or "".join(reason for _, reason in result.skipped)
            seconds = round(time.perf_counter() - began, 2)
            results.write(json.dumps({"test": name, "outcome": outcome, "text": text, "s": seconds}) + "\n")
            exit_if_any_failed(comm, bool(problems))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tests", type=Path, metavar="DIR")
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 3])
    parser.add_argument("--files", nargs="*", default=FILES)
    parser.add_argument("--pattern", default="test_*")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--rank", nargs=2, metavar=("FILE", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        folder = Path(arguments.rank[1])
        run_tests(Path(arguments.rank[0]), json.loads((folder / "tests.json").read_text()), folder)
        return
    report = []
    own = str(Path(__file__).resolve())
    os.environ.pop("HOROVOD_RANK", None)
    for file in arguments.files:
        path = arguments.tests.resolve() / "test" / "parallel" / file
        names = [name for name in sorted(_tests_of(_load(path))) if fnmatch.fnmatch(name, arguments.pattern)]
        for ranks in arguments.ranks:
            outcomes = run_suite([own, "--rank", str(path)], ranks, names)
            counts = Counter(outcome["outcome"] for outcome in outcomes.values())
            entry: dict[str, object] = {"file": file, "ranks": ranks, "tests": len(names), **counts}
            entry["failures"] = {n: o["text"][-600:] for n, o in outcomes.items() if o["outcome"] == "failed"}
            entry["skips"] = Counter(o["text"] for o in outcomes.values() if o["outcome"] == "skipped")
            entry["seconds"] = round(sum(float(o.get("s", 0)) for o in outcomes.values()), 1)
            report.append(entry)
            print(json.dumps(entry, indent=1), flush=True)
    if arguments.output:
        arguments.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
