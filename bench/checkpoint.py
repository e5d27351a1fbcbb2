"""Saving and resuming 1 GiB of state, against plain writing and reading, torch.save and safetensors.

    python bench/checkpoint.py [--rounds 5] [--mib 1024] [--folder DIR] [--torch .venv-torch/bin/python]
    python bench/checkpoint.py --baseline DIR --rounds 10

State is parameters and two slots, float32, in 32 layers. Each round does everything once, alternating: a plain write of
the same bytes with fsync, a blocking save, a plain read, a resume, and the peers. Before each measured read, the file
is read once and dropped from the page cache, because on a virtual disk the first read of a new file may take three
times as long. Before each write, the file is removed. A result is the median over rounds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np
from checkouts import Checkout, compare

from mpitrain import checkpoint

try:
    from mpitrain.core.layout import Layout
except ImportError:  # an older checkout, as a baseline
    from mpitrain.params import Layout  # type: ignore[import-not-found,no-redef]

ROOT = Path(__file__).parent.parent
LAYERS = 32
CHUNK = 1 << 23
VECTORS = ("params", "mean", "square")


def layout_of(mib: int) -> tuple[Layout, int]:
    """Return a layout whose state has about ``mib`` MiB, and the side of its square weights."""
    side = int((mib * 2**20 / 4 / len(VECTORS) / LAYERS) ** 0.5)
    entries = [
        (f"dense{i}.{name}", (side,) * n, "param") for i in range(LAYERS) for name, n in (("weight", 2), ("bias", 1))
    ]
    return Layout.pack(entries), side  # type: ignore[arg-type]


def timed(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def plain_write(path: Path, vectors: dict[str, np.ndarray]) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for vector in vectors.values():
        content = vector.view(np.uint8)
        for start in range(0, len(content), CHUNK):
            os.write(descriptor, content[start : start + CHUNK].data)
    os.fsync(descriptor)
    os.close(descriptor)


def plain_read(path: Path, vectors: dict[str, np.ndarray]) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    for vector in vectors.values():
        content = vector.view(np.uint8)
        for start in range(0, len(content), CHUNK):
            os.readv(descriptor, [content[start : start + CHUNK].data])
    os.close(descriptor)


def forget(path: Path) -> None:
    """Read a file, then drop it from the page cache."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    while os.read(descriptor, CHUNK):
        pass
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def peer(python: str, library: str, what: str, path: Path, side: int) -> float:
    words = [python, str(ROOT / "bench" / "peers" / "saving.py"), library, what, str(path), str(LAYERS), str(side)]
    return float(subprocess.run(words, check=True, capture_output=True, text=True).stdout)


def save(path: Path, layout: Layout, vectors: dict[str, np.ndarray]) -> None:
    if hasattr(checkpoint, "Snapshot"):
        checkpoint.write(path, layout, checkpoint.Snapshot(vectors, 5, 0), 0, {})
    else:  # an older checkout, as a baseline
        checkpoint.write(path, layout, vectors, 5, 0, 0, {})


def one_round(
    folder: Path, layout: Layout, side: int, vectors: dict[str, np.ndarray], python: str | None
) -> dict[str, float]:
    """Return the seconds of each operation in one round."""
    plain, ours = folder / "plain", checkpoint.path_for(folder, 5)
    found = {}
    for path in folder.iterdir():
        path.unlink()
    os.sync()
    found["plain write"] = timed(lambda: plain_write(plain, vectors))
    found["save"] = timed(lambda: save(ours, layout, vectors))
    forget(plain)
    found["plain read"] = timed(lambda: plain_read(plain, vectors))
    forget(ours)
    found["resume"] = timed(lambda: checkpoint.read(ours, layout, vectors, 0))
    forget(ours)
    found["resume auto"] = timed(lambda: resume_newest(folder, layout, vectors))
    for library in ("torch", "safetensors") if python else ():
        path = folder / library
        found[f"{library} save"] = peer(str(python), library, "save", path, side)
        forget(path)
        found[f"{library} load"] = peer(str(python), library, "load", path, side)
    return found


def resume_newest(folder: Path, layout: Layout, vectors: dict[str, np.ndarray]) -> None:
    """Resume as ``--resume auto`` does: read the newest intact checkpoint."""
    paths = checkpoint.steps(folder).values()
    found, _ = checkpoint.first_intact(paths, lambda path: checkpoint.read(path, layout, vectors, 0))
    assert found is not None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--folder", type=Path, help="folder on the disk to measure  [default: a temporary folder]")
    parser.add_argument("--torch", default=str(ROOT / ".venv-torch" / "bin" / "python"))
    parser.add_argument("--baseline", type=Path, metavar="DIR", help="compare with another checkout instead")
    parser.add_argument("--inner", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.baseline is not None:
        words = [Path(__file__).resolve(), "--inner", "--mib", arguments.mib]
        words += [] if arguments.folder is None else ["--folder", arguments.folder.resolve()]

        def save_and_load(checkout: Checkout) -> list[float]:
            return [float(speed) for speed in checkout.run(*map(str, words)).split()]

        compare("save, load, verify", Checkout(arguments.baseline.resolve()), save_and_load, arguments.rounds)
        return
    python = arguments.torch if Path(arguments.torch).exists() else None
    layout, side = layout_of(arguments.mib)
    rng = np.random.default_rng(0)
    vectors = {name: rng.standard_normal(layout.size, np.float32) for name in VECTORS}
    gib = sum(vector.nbytes for vector in vectors.values()) / 2**30
    times: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        if arguments.inner:
            path = checkpoint.path_for(Path(folder), 5)
            actions = (
                lambda: save(path, layout, vectors),
                lambda: checkpoint.read(path, layout, vectors, 0),
                lambda: checkpoint.verify(path),
            )
            for action in actions:
                print(gib / timed(action))
                forget(path)
            return
        for _ in range(arguments.rounds):
            for name, seconds in one_round(Path(folder), layout, side, vectors, python).items():
                times[name].append(seconds)
    print(f"{gib:.2f} GiB of state, medians of {arguments.rounds} rounds\n{'':18} {'s':>6} {'GiB/s':>6}   vs plain")
    for name, seconds in times.items():
        median = statistics.median(seconds)
        against = statistics.median(times["plain write" if name.endswith(("save", "write")) else "plain read"])
        wanted = "   target 85%" if name in ("save", "resume", "resume auto") else ""
        print(
            f"{name:18} {median:6.3f} {gib / median:6.2f}   {against / median:8.0%}   "
            f"({gib / max(seconds):.2f} to {gib / min(seconds):.2f} GiB/s){wanted}"
        )


if __name__ == "__main__":
    sys.exit(main())
