"""A program whose ranks connect to rank 0, that saves its steps, and resumes.

Its arguments: a folder, the number of steps, and how it ends at SIGTERM. With ``save``, it then saves and exits with
status 75. With ``die``, the signal kills it, and it saves after every step.
"""

import os
import signal
import socket
import sys
import time
from pathlib import Path

folder, steps, ending = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
checkpoint = folder / f"step-{os.environ['RANK']}"
folder.mkdir(parents=True, exist_ok=True)
step = int(checkpoint.read_text()) if checkpoint.exists() else 0


def meet() -> None:
    """Connect to rank 0, which waits for all other ranks."""
    address, port, others = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), int(os.environ["WORLD_SIZE"]) - 1
    if os.environ["RANK"] == "0":
        with socket.create_server((address, port)) as server:
            server.settimeout(20)
            for _ in range(others):
                server.accept()[0].close()
        return
    deadline = time.monotonic() + 20
    while True:
        try:
            return socket.create_connection((address, port), timeout=20).close()
        except ConnectionRefusedError:  # rank 0 does not listen yet
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def save() -> None:
    partial = checkpoint.with_suffix(".partial")
    partial.write_text(str(step))
    partial.replace(checkpoint)


def save_and_exit(number: int, frame: object) -> None:
    save()
    sys.exit(75)


with (folder / f"starts-{os.environ['RANK']}").open("a") as file:
    file.write(f"{step}\n")
if ending == "save":
    signal.signal(signal.SIGTERM, save_and_exit)
meet()
while step < steps:
    time.sleep(0.05)
    step += 1
    if ending == "die" or step == 1:
        save()
save()
