"""Compare mpitrain's readers of data with other readers and with the writers, on files of random content.

    python bench/formats.py [--files 2000] [--damaged 10000] [--seed 0] [--peers PYTHON] [--only csv ...] [--number K]

Each format has ``--files`` cases: files that public packages write, with random valid features. A case is ``equal`` if
all values and their types are as expected; ``refused`` if mpitrain raises an error of one line; else it is a fault.
Then ``--damaged`` files in all are damaged and read. A damaged file that is read with other values is a fault only
where its format has a checksum or a length of the damaged part. A traceback, a crash, and 10 seconds without a result
are always faults. ``--only FORMAT --number K`` repeats a case. Cases run in a child process.

``PYTHON`` has webdataset and tensorflow-cpu (``make bench-env``: .venv-input).
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import re
import shutil
import sys
import tempfile
import traceback
import warnings
import zlib
from collections import Counter
from collections.abc import Iterable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from environment import use_this_checkout

BENCH = Path(__file__).parent
FORMATS = {
    "csv": "tables.csv_files",
    "parquet": "tables.parquet",
    "arrow": "tables.arrow",
    "tar": "archives.tar",
    "npy": "archives.npy",
    "tfrecord": "archives.tfrecord",
    "images": "arrays.images",
    "folders": "arrays.folders",
    "hdf5": "arrays.hdf5",
    "idx": "arrays.idx",
}
WAYS = ("flip", "flips", "cut", "zeros", "twice", "inserted")
FIRST_SECONDS, SECONDS = 120, 10  # the first case starts the process, and that of the peers
SHOWN = 12  # kinds of refusals and faults of each format


def generator(seed: int, name: str, number: int) -> np.random.Generator:
    return np.random.default_rng([seed, zlib.crc32(name.encode()), number])


def damage(path: Path, rng: np.random.Generator) -> tuple[str, int, int]:
    """Damage a file; return the way, and the first and last changed byte."""
    content = bytearray(path.read_bytes())
    way, size = str(rng.choice(WAYS)), len(content)
    start = int(rng.integers(size))
    stop = min(size, start + int(rng.integers(1, 600)))
    if way == "flip":
        stop = start + 1
        content[start] ^= 1 << int(rng.integers(8))
    elif way == "flips":
        stop = min(size, start + 8)
        for at in range(start, stop):
            content[at] = int(rng.integers(256))
    elif way == "cut":
        stop = size
        del content[start:]
    elif way == "zeros":
        content[start:stop] = bytes(stop - start)
    elif way == "twice":
        content[start:start] = content[start:stop]
    else:
        content[start:start] = rng.bytes(stop - start)
    path.write_bytes(content)
    return way, start, stop


def outcome(make: Any, peers: Any, seed: int, name: str, number: int, is_damaged: bool) -> tuple[str, str]:
    """Return what happens when a case is read, and details."""
    from format_cases.values import difference

    from mpitrain.errors import DataError

    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        try:
            case = make(generator(seed, name, number), Path(folder), *([peers] if name in ("tar", "tfrecord") else []))
        except Exception as error:
            return "unwritten", f"{type(error).__name__}: {error}"
        changed, about = ("", 0, 0), case.about
        if is_damaged:
            rng = generator(seed + 1, name, number)
            victim = case.files[0]
            before = victim.read_bytes()
            changed = damage(victim, rng)
            about += f"; damaged: {victim.name} {changed}"
            if victim.read_bytes() == before:
                return "equal", about
        try:
            differs = difference(case.read(), case.expected)
        except (DataError, *case.refusals) as error:
            is_one_line = "\n" not in str(error) and str(error)
            return "refused" if is_one_line else "traceback", f"{str(error).replace(folder, '')} ({about})"
        except BaseException as error:
            where = traceback.format_exc().strip().splitlines()
            lines = [line.strip() for line in where if line.startswith("  File")]
            return "traceback", f"{type(error).__name__}: {error} ({about})\n    {lines[-1]}"
        if not differs:
            return "equal", about
        if is_damaged and not case.is_protected(*changed):
            return "changed", f"{differs} ({about})"
        return "different", f"{differs} ({about})"


def child(pipe: Connection, seed: int, python: str) -> None:
    """Run cases until the pipe ends."""
    warnings.simplefilter("ignore")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # libtiff prints what is wrong with images
    sys.path.insert(0, str(BENCH))
    from format_cases.values import Peers

    peers = Peers(python)
    while pipe.poll(None):
        try:
            name, number, is_damaged = pipe.recv()
        except EOFError:
            return
        try:
            module, function = FORMATS[name].split(".")
            make = getattr(importlib.import_module(f"format_cases.{module}"), function)
            pipe.send(outcome(make, peers, seed, name, number, is_damaged))
        except Exception:
            pipe.send(("harness", traceback.format_exc()))


class Child:
    """A process that runs cases, and is started again when it has crashed or does not answer."""

    def __init__(self, seed: int, python: str) -> None:
        self._seed, self._python = seed, python
        self._started: Any = None

    def run(self, name: str, number: int, is_damaged: bool) -> tuple[str, str]:
        limit = SECONDS
        if self._started is None:
            context = multiprocessing.get_context("spawn")
            pipe, other = context.Pipe()
            process = context.Process(target=child, args=(other, self._seed, self._python), daemon=True)
            process.start()
            other.close()
            self._started, limit = (process, pipe), FIRST_SECONDS
        process, pipe = self._started
        pipe.send((name, number, is_damaged))
        try:
            if pipe.poll(limit):
                result: tuple[str, str] = pipe.recv()
                return result
            fault = "hang"
        except EOFError:
            fault = "crash"
        process.kill()
        process.join()
        self._started = None
        return fault, f"exit code {process.exitcode}"


def signature(details: str) -> str:
    """Return what faults of one kind have in common: the text without names, numbers and what is special."""
    text = re.sub(
        r"'[^']*'|/[^,:]*?(?=[ :,])|[-+\d.]+",
        "_",
        details.partition("\n")[0].partition(" (")[0].partition(": array(")[0],
    )
    return re.sub(r"^[^:]*: (?=\w)", "", text)[:140]


def report(name: str, results: Iterable[tuple[int, str, str]], kinds: tuple[str, ...]) -> None:
    """Print a line of counts, and each kind of refusals and faults with the number of its first case."""
    counts: Counter[str] = Counter()
    found: dict[tuple[str, str], list[tuple[int, str]]] = {}
    for number, result, details in results:
        counts[result] += 1
        if result not in ("equal", "changed") and not (result == "refused" and kinds[0] == "refused"):
            found.setdefault((result, signature(details)), []).append((number, details))
    print(f"{name:10} {sum(counts.values()):6}", "  ".join(f"{kind} {counts[kind]}" for kind in kinds), flush=True)
    for (result, _), cases in sorted(found.items(), key=lambda item: -len(item[1]))[:SHOWN]:
        number, details = min(cases, key=lambda case: len(case[1]))
        print(f"  {len(cases)} {result}, --only {name} --number {number}: {details[:600]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--files", type=int, default=2000)
    parser.add_argument("--damaged", type=int, default=10000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--number", type=int, nargs="+", help="only these cases, which are shown")
    parser.add_argument("--peers", default=str(BENCH.parent / ".venv-input" / "bin" / "python"))
    arguments = parser.parse_args()
    use_this_checkout()
    if shutil.which("tar") is None:
        raise SystemExit("formats.py needs GNU tar")
    runs = Child(arguments.seed, arguments.peers)
    if arguments.number is not None:
        for number in arguments.number:
            for is_damaged in (False, True):
                print(number, "damaged" if is_damaged else "whole", *runs.run(arguments.only[0], number, is_damaged))
        return
    for name in arguments.only:
        cases = ((number, *runs.run(name, number, False)) for number in range(arguments.files))
        report(name, cases, ("equal", "refused", "different", "traceback", "hang", "crash", "unwritten"))
    for name in arguments.only:
        count = arguments.damaged // len(arguments.only)
        cases = ((number, *runs.run(name, number, True)) for number in range(count))
        report(name, cases, ("refused", "equal", "changed", "different", "traceback", "hang", "crash"))


if __name__ == "__main__":
    main()
