from __future__ import annotations

import atexit
import os
from pathlib import Path
from typing import Any

from .schedule import Operation

launches = 0


class Graph:
    def __init__(self, operations: list[Operation]) -> None:
        self._operations = operations

    def launch(self, stream: Any = None) -> None:
        from .stream import get_current_stream

        stream = get_current_stream() if stream is None else stream
        assert not stream.is_capturing(), "a graph is launched in a capture"
        global launches
        launches += 1
        for operation in self._operations:
            stream.queue.put(operation)

    def upload(self, stream: Any = None) -> None:
        pass


@atexit.register
def _report() -> None:
    if "SIMULATED_REPORT" in os.environ:
        Path(os.environ["SIMULATED_REPORT"], str(os.getpid())).write_text(str(launches))
