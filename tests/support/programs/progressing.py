"""A program that reports progress until rank 1 hangs; its first argument is the number of steps before that."""

import os
import sys
import time
from pathlib import Path

import mpitrain

for step in range(100_000):
    mpitrain.progress(step)
    if step == 20:
        Path(sys.argv[2], f"ready-{os.environ['RANK']}").touch()
    while step == int(sys.argv[1]) and os.environ["RANK"] == "1":
        pass
    time.sleep(0.01)
