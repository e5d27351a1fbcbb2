"""Starts the ranks of a peer that communicates with ``torch.distributed``."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

import torch.multiprocessing as mp


def run_ranks(main: Callable[..., None], ranks: int, *arguments: object) -> None:
    """Run ``main(rank, ranks, *arguments)`` in a process for each rank; a single rank runs in this process.

    ``dist.init_process_group("gloo", rank=rank, world_size=ranks)`` then connects them, on a free port.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))  # the processes inherit them
    if ranks == 1:
        main(0, 1, *arguments)
    else:
        mp.spawn(main, (ranks, *arguments), ranks)
