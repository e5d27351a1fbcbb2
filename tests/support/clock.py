"""Programs whose clock is wrong by hours."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from .launch import missing, run

_SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>
int clock_gettime(clockid_t clock, struct timespec *now) {
  static int (*real)(clockid_t, struct timespec *);
  if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
  int status = real(clock, now);
  if (clock == CLOCK_REALTIME) now->tv_sec += SECONDS;
  return status;
}
"""


def with_wrong_clock(folder: Path, seconds: int) -> dict[str, str]:
    """Return an environment in which Python's ``time.time`` is ahead by some seconds. Skips the test without g++."""
    if shutil.which("g++") is None:
        missing("g++")
    source, library = folder / "clock.c", folder / f"clock{seconds}.so"
    source.write_text(_SOURCE)
    words = ["g++", "-x", "c", f"-DSECONDS={seconds}", "-shared", "-fPIC", source, "-ldl", "-o", library]
    done = run(list(map(str, words)))
    assert done.returncode == 0, done.stderr
    return {**os.environ, "LD_PRELOAD": str(library)}
