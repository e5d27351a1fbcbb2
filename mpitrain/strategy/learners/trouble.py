"""The time in which a learner cannot use the store, which it reports."""

from __future__ import annotations

import logging
import time

from ...core.words import one_line

_WARN_S = 30.0  # seconds between the first two warnings
_log = logging.getLogger(__name__)


class Trouble:
    """Reports when the store cannot be used, at growing intervals, and when it can be used again.

    Attributes:
        since: When the trouble began, on the monotonic clock; None if there is none.
    """

    def __init__(self) -> None:
        self.since: float | None = None
        self._warn_s = 0.0  # when to warn again

    def report(self, error: OSError) -> None:
        """Warn at once, and then each time when the trouble has lasted twice as long."""
        now = time.monotonic()
        if self.since is None:
            self.since = self._warn_s = now
        if now >= self._warn_s:
            seconds = now - self.since
            self._warn_s = now + max(_WARN_S, seconds)
            _log.warning(
                "the folder of the learners cannot be used%s: %s; training goes on alone meanwhile",
                f" for {seconds:.0f} s" if seconds else "",
                one_line(error),
            )

    def end(self) -> None:
        """Report the end of the trouble, if there was any."""
        if self.since is not None:
            seconds, self.since = time.monotonic() - self.since, None
            _log.info("the folder of the learners can be used again, after %.0f s", seconds)
