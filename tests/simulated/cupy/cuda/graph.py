from __future__ import annotations

from typing import Any

from .schedule import Operation


class Graph:
    def __init__(self, operations: list[Operation]) -> None:
        self._operations = operations

    def launch(self, stream: Any = None) -> None:
        from .stream import get_current_stream

        stream = get_current_stream() if stream is None else stream
        assert not stream.is_capturing(), "a graph is launched in a capture"
        for operation in self._operations:
            stream.queue.put(operation)

    def upload(self, stream: Any = None) -> None:
        pass
