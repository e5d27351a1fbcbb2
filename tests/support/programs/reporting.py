"""A program that does not use mpitrain: does what its first argument requests, and writes its environment."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

rank = int(os.environ["RANK"])
action, folder = sys.argv[1], Path(sys.argv[2])
names = [name for name in os.environ if name.endswith(("RANK", "WORLD_SIZE")) or name.startswith(("MASTER", "TORCH"))]
record = {name: os.environ[name] for name in [*names, "OMP_NUM_THREADS", "ROLE_NAME"]}
record |= {"argv": sys.argv[3:], "pythonpath": os.environ.get("PYTHONPATH"), "pid": os.getpid(), "path": sys.path}
restart = os.environ["TORCHELASTIC_RESTART_COUNT"]
(folder / f"{rank}-{restart}.json").write_text(json.dumps(record))


def save(number: int, frame: object) -> None:
    time.sleep(0.3 + 0.5 * rank)  # the ranks end at different times
    (folder / f"saved-{rank}").write_text(signal.Signals(number).name)
    sys.exit(0 if action.startswith("finish") else 75)


if action == "print":
    print("to standard output")
    print("to standard error", file=sys.stderr)
elif action == "raise" and rank == 1:
    raise ValueError("no such thing")
elif action == "status" and rank == 1:
    sys.exit(3)
elif action == "leave":
    subprocess.Popen(["sleep", "300"])
elif action == "kill" and rank == 1 and restart == "0":
    os.kill(os.getpid(), signal.SIGKILL)
elif action in ("stop", "finish"):
    signal.signal(getattr(signal, sys.argv[3]) if sys.argv[3:] else signal.SIGTERM, save)
    (folder / f"ready-{rank}").touch()
if action in ("raise", "status", "stop", "finish", "wait") or (action == "kill" and restart == "0"):
    time.sleep(60)
