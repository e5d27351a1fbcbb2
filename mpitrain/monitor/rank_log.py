"""A rank's messages from ``logging`` and ``warnings``: in ``logs/rank-N.log`` with timestamps, and on the terminal.

The chief prints the messages of this package and of the job file at level INFO and above, and all warnings. Modules of
this package use ``logging.getLogger(__name__)``; level DEBUG is for the file only.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import logging.handlers
import os
import sys
import warnings
from pathlib import Path
from typing import TextIO

from ..errors import UserError
from ..process.rank_status import RUN_DIR_VARIABLE, WARNED, folder_of
from .console import Console

_FORMAT = "%(asctime)s.%(msecs)03d %(levelname)s %(name)s: %(message)s"
_TIME = "%Y-%m-%d %H:%M:%S"
_MOST_FILES = 1000  # maximum number of warnings of a process that are compared with those of other ranks
_asked = itertools.count()
_EARLY_MESSAGES = 10_000  # number of messages that are kept until the file is open


def path_for(folder: Path, rank: int) -> Path:
    """Return the path of a rank's log in a run directory."""
    return folder / "logs" / f"rank-{rank}.log"


class RankLog:
    """Captures the process's log messages and warnings until it is closed. Every rank has its own.

    Messages are written to the file from ``open`` on, including the messages captured before.

    Args:
        console: The chief's console; None on other ranks.
        warns: Whether a rank without console prints warnings that no other rank has printed. Without ``mpitrain run``,
            this is not known, and only the chief should print them.
    """

    def __init__(self, console: Console | None, warns: bool) -> None:
        self._early = logging.handlers.MemoryHandler(_EARLY_MESSAGES, flushLevel=sys.maxsize)
        self._file: logging.Handler | None = None
        self._handlers: list[logging.Handler] = [self._early]
        if console is not None:
            self._handlers.append(_ConsoleHandler(console))
        elif warns:
            self._handlers.append(_to_stderr())
        root = logging.getLogger()
        self._level = root.level
        root.setLevel(logging.INFO)
        logging.getLogger("mpitrain").setLevel(logging.DEBUG)
        for handler in self._handlers:
            root.addHandler(handler)
        logging.captureWarnings(True)

    def open(self, folder: Path, rank: int) -> None:
        """Begin to write the log file in a run directory.

        Raises:
            OSError: The file cannot be written.
        """
        path = path_for(folder, rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = _FileHandler(path, encoding="utf-8", errors="backslashreplace")
        self._file.setFormatter(logging.Formatter(_FORMAT, _TIME))
        self._early.setTarget(self._file)
        self._early.flush()
        logging.getLogger().removeHandler(self._early)
        logging.getLogger().addHandler(self._file)
        self._handlers[0] = self._file

    def failed(self, error: BaseException) -> None:
        """Write how the rank ended to the log file only, if it is open; the caller prints the error."""
        if self._file is not None:
            kind, is_user_error = type(error), isinstance(error, UserError)
            message = str(error) if is_user_error else f"unexpected {kind.__name__}"
            details = None if is_user_error else (kind, error, error.__traceback__)
            self._file.handle(logging.LogRecord("mpitrain", logging.ERROR, "", 0, message, (), details))

    def close(self) -> None:
        """Stop capturing log messages and warnings; later calls do nothing."""
        root = logging.getLogger()
        for handler in self._handlers:
            root.removeHandler(handler)
            with contextlib.suppress(OSError):  # the disk is full
                handler.close()
        if self._handlers:
            root.setLevel(self._level)
            logging.captureWarnings(False)
        self._handlers, self._file = [], None


def show_warnings(shown: bool) -> None:
    """Until a ``RankLog`` captures warnings, print each warning of this process as one line, or print none."""

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if shown:
            text = warnings.formatwarning(message, category, filename, lineno)
            line = f"WARNING: {text.splitlines()[0]}"
            if _is_new(line):
                print(line, file=sys.stderr, flush=True)

    warnings.showwarning = show


class _FileHandler(logging.FileHandler):
    """Drops messages that the disk cannot hold, instead of printing a traceback for each."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802, logging's name
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


class _Printed(logging.Formatter):
    """Names the level of warnings and errors, and removes the line of source code at the end of a warning."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if record.levelno < logging.WARNING:
            return text
        return f"{record.levelname}: {text.splitlines()[0] if record.name == 'py.warnings' and text else text}"


class _ConsoleHandler(logging.Handler):
    """Prints on the chief, above the progress bar."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.INFO)
        self._console = console
        self._printed: set[str] = set()
        self.setFormatter(_Printed())

    def filter(self, record: logging.LogRecord) -> bool:
        package = record.name.split(".")[0]
        return package == "mpitrain" or package.startswith("mpitrain_job_") or record.levelno >= logging.WARNING

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text, is_warning = self.format(record), record.levelno >= logging.WARNING
            if not is_warning or text in self._printed or _is_new(text):
                self._console.print(text, error=is_warning)
                self._printed.add(text)
        except Exception:
            self.handleError(record)


def _to_stderr() -> logging.Handler:
    handler = logging.StreamHandler(sys.stderr)
    handler.setLevel(logging.WARNING)
    handler.setFormatter(_Printed())
    handler.addFilter(lambda record: _is_new(handler.format(record)))
    return handler


def _is_new(text: str) -> bool:
    """Return whether no rank of a run has printed a warning; from now on, this one has."""
    run_dir = os.environ.get(RUN_DIR_VARIABLE)
    if run_dir is not None and next(_asked) < _MOST_FILES:
        path = folder_of(Path(run_dir)) / f"{WARNED}{hashlib.sha256(text.encode(errors='replace')).hexdigest()}"
        try:
            path.parent.mkdir(exist_ok=True)
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        except OSError:  # the folder is missing, or the disk is full
            return True
    return True
