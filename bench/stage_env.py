"""What ``--stage-env`` saves if opening a file takes long, as on a file system that many hosts share.

    python bench/stage_env.py [--ranks 2] [--rounds 5] [--delay-ms 2]

A preloaded library delays every ``open`` of a file below the environment. Programs that import NumPy, h5py and torch
start with and without ``--stage-env``, in turns. Needs a C compiler. The copy takes as much space in /tmp as the
environment: the first run, which makes it, is reported by itself.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

DELAY = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
static void delay(const char *path) {
    static const char *prefix, *us;
    if (!prefix) { prefix = getenv("DELAYED"); us = getenv("DELAY_US"); }
    if (prefix && us && path && !strncmp(path, prefix, strlen(prefix))) usleep(atoi(us));
}
#define MODE(flags) mode_t mode = 0; \
    if (flags & (O_CREAT | O_TMPFILE)) { va_list more; va_start(more, flags); mode = va_arg(more, int); va_end(more); }
int open(const char *path, int flags, ...) {
    MODE(flags) delay(path);
    return ((int (*)(const char *, int, ...))dlsym(RTLD_NEXT, "open"))(path, flags, mode);
}
int open64(const char *path, int flags, ...) {
    MODE(flags) delay(path);
    return ((int (*)(const char *, int, ...))dlsym(RTLD_NEXT, "open64"))(path, flags, mode);
}
int openat(int folder, const char *path, int flags, ...) {
    MODE(flags) delay(path);
    return ((int (*)(int, const char *, int, ...))dlsym(RTLD_NEXT, "openat"))(folder, path, flags, mode);
}
FILE *fopen(const char *path, const char *mode) {
    delay(path);
    return ((FILE * (*)(const char *, const char *))dlsym(RTLD_NEXT, "fopen"))(path, mode);
}
FILE *fopen64(const char *path, const char *mode) {
    delay(path);
    return ((FILE * (*)(const char *, const char *))dlsym(RTLD_NEXT, "fopen64"))(path, mode);
}
"""
PROGRAMS = {"numpy, h5py": "import numpy, h5py", "torch": "import torch, torch._dynamo"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--delay-ms", type=float, default=2.0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "delay.c").write_text(DELAY)
        library = folder / "delay.so"
        subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-o", library, folder / "delay.c", "-ldl"], check=True)
        prefix = sys.prefix  # where files are opened late; a checkout outside of it is fast
        slow = {"LD_PRELOAD": str(library), "DELAYED": f"{prefix}/", "DELAY_US": str(int(arguments.delay_ms * 1000))}
        local = folder / "local"
        print(f"{arguments.ranks} ranks, {arguments.delay_ms:g} ms for each open below the environment")
        first = seconds(arguments.ranks, "pass", slow, folder, local)
        size = sum(path.lstat().st_size for path in local.rglob("*"))
        print(f"the first run, which copies {size / 1e9:.2f} GB: {first:.1f} s")
        for what, program in PROGRAMS.items():
            times: dict[str, list[float]] = {"original": [], "copy": []}
            for _ in range(arguments.rounds):
                times["original"].append(seconds(arguments.ranks, program, slow, folder, None))
                times["copy"].append(seconds(arguments.ranks, program, slow, folder, local))
            original, copy = (statistics.median(values) for values in times.values())
            print(
                f"{what}: original {original:.1f} s, copy {copy:.1f} s: {original / copy:.2f} times as fast", flush=True
            )
        shutil.rmtree(local)


def seconds(ranks: int, program: str, environment: dict[str, str], folder: Path, local: Path | None) -> float:
    """Return how long a program takes on some ranks."""
    words = [sys.executable, "-m", "mpitrain", "run", "-n", str(ranks), "--run-dir", str(folder / "run")]
    words += [] if local is None else ["--stage-env", str(local)]
    began = time.perf_counter()
    subprocess.run([*words, "--", sys.executable, "-c", program], env={**os.environ, **environment}, check=True)
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
