"""``logs/rank-N.log``: what Python's ``logging`` and ``warnings`` have to say on a rank, with the time."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from ..errors import UserError

_FORMAT = "%(asctime)s.%(msecs)03d %(levelname)s %(name)s: %(message)s"
_TIME = "%Y-%m-%d %H:%M:%S"


def path_for(folder: Path, rank: int) -> Path:
    """Where a rank's log lies in a run directory."""
    return folder / "logs" / f"rank-{rank}.log"


class RankLog:
    """Takes the process's log and warnings until it is closed; every rank's own.

    Args:
        folder: The run directory.
        printed: Whether warnings of logging's level and above are printed, too: by the chief alone, for the same
            warning from every rank would bury the rest; under ``mpitrain run``, which shows it once, by all.

    Raises:
        OSError: The log cannot be written.
    """

    def __init__(self, folder: Path, rank: int, printed: bool) -> None:
        path = path_for(folder, rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._handlers: list[logging.Handler] = [logging.FileHandler(path, encoding="utf-8")]
        self._handlers[0].setFormatter(logging.Formatter(_FORMAT, _TIME))
        if printed:
            self._handlers.append(_to_terminal())
        root = logging.getLogger()
        self._level = root.level
        root.setLevel(logging.INFO)
        for handler in self._handlers:
            root.addHandler(handler)
        logging.captureWarnings(True)

    def failed(self, error: BaseException) -> None:
        """Write how the rank ended into the file alone: what is printed is decided elsewhere."""
        if self._handlers:
            kind, told = type(error), isinstance(error, UserError)
            message = str(error) if told else f"unforeseen {kind.__name__}"
            details = None if told else (kind, error, error.__traceback__)
            self._handlers[0].handle(logging.LogRecord("mpitrain", logging.ERROR, "", 0, message, (), details))

    def close(self) -> None:
        """Give log and warnings back; later calls do nothing."""
        root = logging.getLogger()
        for handler in self._handlers:
            root.removeHandler(handler)
            handler.close()
        if self._handlers:
            root.setLevel(self._level)
            logging.captureWarnings(False)
        self._handlers = []


class _Printed(logging.Formatter):
    """Leaves out the line of source code that a warning ends with."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return text.splitlines()[0] if record.name == "py.warnings" and text else text


def _to_terminal() -> logging.Handler:
    handler = logging.StreamHandler(sys.stderr)
    handler.setLevel(logging.WARNING)
    handler.setFormatter(_Printed("%(levelname)s: %(message)s"))
    return handler
