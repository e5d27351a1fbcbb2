"""``logs/rank-N.log``: a rank's messages from ``logging`` and ``warnings``, with timestamps."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from ..errors import UserError

_FORMAT = "%(asctime)s.%(msecs)03d %(levelname)s %(name)s: %(message)s"
_TIME = "%Y-%m-%d %H:%M:%S"


def path_for(folder: Path, rank: int) -> Path:
    """Return the path of a rank's log in a run directory."""
    return folder / "logs" / f"rank-{rank}.log"


class RankLog:
    """Captures the process's log messages and warnings until it is closed. Every rank has its own.

    Args:
        folder: The run directory.
        printed: Whether messages of level WARNING and above are also printed. Otherwise only the chief prints, to avoid
            repeating a warning for every rank; under ``mpitrain run``, which removes duplicates, all ranks do.

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
        """Write how the rank ended to the log file only; the caller prints the error."""
        if self._handlers:
            kind, is_user_error = type(error), isinstance(error, UserError)
            message = str(error) if is_user_error else f"unexpected {kind.__name__}"
            details = None if is_user_error else (kind, error, error.__traceback__)
            self._handlers[0].handle(logging.LogRecord("mpitrain", logging.ERROR, "", 0, message, (), details))

    def close(self) -> None:
        """Stop capturing log messages and warnings; later calls do nothing."""
        root = logging.getLogger()
        for handler in self._handlers:
            root.removeHandler(handler)
            handler.close()
        if self._handlers:
            root.setLevel(self._level)
            logging.captureWarnings(False)
        self._handlers = []


class _Printed(logging.Formatter):
    """Removes the line of source code at the end of a warning."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return text.splitlines()[0] if record.name == "py.warnings" and text else text


def _to_terminal() -> logging.Handler:
    handler = logging.StreamHandler(sys.stderr)
    handler.setLevel(logging.WARNING)
    handler.setFormatter(_Printed("%(levelname)s: %(message)s"))
    return handler
