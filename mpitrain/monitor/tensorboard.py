"""TensorBoard events in a run directory: scalars and optional histograms.

Events are created by tensorboardX's classes in the training thread. tensorboardX's own writer is not used. It passes
events to a thread through a queue, which blocks forever if that thread fails on a full disk. Here a background thread
only flushes the file.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ..core.layout import Array
from ..errors import ConfigError
from ..plan.metric import PREFIX

FLUSH_S = 10.0
MAX_BUCKETS = 64

# TensorBoard groups tags by the part before the slash.
_TAGS = {
    "loss": "loss/training",
    "learning_rate": "learning_rate/learning_rate",
    "examples_per_s": "speed/examples_per_s",
    "step_s": "speed/step_s",
    "staleness_mean": "staleness/mean",
    "staleness_max": "staleness/max",
    "dropped": "staleness/dropped",
    "internode_bytes": "communication/internode_bytes",
    "saved_bytes": "communication/saved_bytes",
}
_log = logging.getLogger(__name__)


def _tag(name: str) -> str:
    """Return the tag of a measured value."""
    if name in _TAGS:
        return _TAGS[name]
    return f"{name.removeprefix(PREFIX)}/validation" if name.startswith(PREFIX) else f"measured/{name}"


def available() -> bool:
    """Return whether tensorboardX is installed."""
    return importlib.util.find_spec("tensorboardX") is not None


@contextmanager
def _without_torch() -> Iterator[None]:
    """Hide torch from imports, unless the job uses torch, because importing torch in tensorboardX takes seconds."""
    hidden = "torch" not in sys.modules
    if hidden:
        sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if hidden:
            del sys.modules["torch"]


class Events:
    """One event file; chief only.

    If the disk cannot be written, one warning is logged and the events end; the run continues.

    Args:
        folder: Directory of the file; TensorBoard's ``--logdir``.

    Raises:
        ConfigError: tensorboardX is not installed.
        OSError: The file cannot be created.
    """

    def __init__(self, folder: Path) -> None:
        if not available():
            raise ConfigError("--tensorboard requires tensorboardX; run pip install 'mpitrain[tensorboard]'")
        with _without_torch():
            self._event = importlib.import_module("tensorboardX.proto.event_pb2")
            self._summary = importlib.import_module("tensorboardX.summary")
            record_writer = importlib.import_module("tensorboardX.record_writer")
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}"
        self._writer: Any = record_writer.RecordWriter(str(folder / name))
        self._failed = False
        self._closing = threading.Event()
        self._put(file_version="brain.Event:2")
        self._flusher = threading.Thread(target=self._flush_now_and_then, name="tensorboard", daemon=True)
        self._flusher.start()

    def begin(self, step: int) -> None:
        """Record the step from which training continues: TensorBoard discards earlier events after that step."""
        start = self._event.SessionLog(status=self._event.SessionLog.START)
        self._put(step=step + 1, session_log=start)

    def scalars(self, step: int, measured: Mapping[str, Any]) -> None:
        """Add values measured at ``step``: numbers, and, in modes with servers, statistics of workers and staleness."""
        values = {_tag(n): v for n, v in measured.items() if isinstance(v, (int, float))}
        for stats in measured.get("workers", []):
            prefix = f"worker{stats.get('worker', '')}"
            values |= {f"{prefix}/{n}": v for n, v in stats.items() if n != "worker" and isinstance(v, (int, float))}
        summary = self._summary.Summary()
        for tag, value in values.items():
            summary.value.add(tag=tag, simple_value=value)
        counts = measured.get("staleness_histogram")
        if counts and any(counts):
            summary.value.extend(self._counted("staleness/histogram", counts).value)
        self._put(step=step, summary=summary)

    def histograms(self, step: int, prefix: str, views: Mapping[str, Array]) -> None:
        """Add a histogram of each array, of any shape; non-finite elements are ignored."""
        for name, view in views.items():
            values = np.asarray(view, np.float64).ravel()
            values = values[np.isfinite(values)]
            if values.size:
                made = self._summary.histogram(f"{prefix}/{name}", values, bins=min(MAX_BUCKETS, values.size))
                self._put(step=step, summary=made)

    def close(self) -> None:
        """Flush and close the file; later calls do nothing."""
        if not self._closing.is_set():
            self._closing.set()
            self._flusher.join()
            self._guard(self._writer.flush)
            self._guard(self._writer.close)

    def _counted(self, tag: str, counts: list[int]) -> Any:
        """Return a histogram of values ``i`` with counts ``counts[i]``."""
        n, values = np.asarray(counts, np.float64), np.arange(len(counts), dtype=np.float64)
        nonzero = np.flatnonzero(n)
        total, squares = float(n @ values), float(n @ values**2)
        limits = (values + 0.5).tolist()
        return self._summary.histogram_raw(
            tag, float(nonzero[0]), float(nonzero[-1]), float(n.sum()), total, squares, limits, n.tolist()
        )

    def _put(self, **content: Any) -> None:
        if not self._failed:
            event = self._event.Event(wall_time=time.time(), **content)
            self._guard(lambda: self._writer.write(event.SerializeToString()))

    def _flush_now_and_then(self) -> None:
        while not self._closing.wait(FLUSH_S) and not self._failed:
            self._guard(self._writer.flush)

    def _guard(self, write: Any) -> None:
        try:
            write()
        except (OSError, ValueError) as error:  # a closed file raises ValueError
            if not self._failed:
                _log.warning("no further TensorBoard events, because the file cannot be written: %s", error)
            self._failed = True
