"""A process as a rank: from its start to the regular exit, or to the end of all ranks after an error."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

from ..comm.cluster import Cluster, OtherRankFailed, report_crash
from ..errors import UserError
from ..monitor.rank_log import show_warnings
from ..monitor.trace import span
from ..process.fork_server import stop_server
from ..process.launcher_env import is_launched, launched_rank, leave_outer_run, mark_rank
from ..process.rank_status import RUN_DIR_VARIABLE, RankStatusFile
from ..process.reaper import become_reaper
from ..process.signals import STOPPED_EARLY
from ..process.standard_streams import set_output_prefix
from .session import training_session
from .setup import TrainRequest

_WAIT = span("wait")
_BEFORE_REPORT_S = 0.5  # delay of an error report for each of up to four lower ranks


class Rank:
    """This process as a rank. The package controls the process until it exits.

    If a launcher started the rank and ``forks`` is True, construction starts the rank's reaper. Under ``mpitrain run``,
    construction registers the rank. Call ``start`` next.

    Args:
        forks: Whether this process may become the reaper, and a child process of it the rank.

    Attributes:
        status: The status of this rank that ``mpitrain run`` reads.
        is_alone: Whether no launcher has started this process.
    """

    def __init__(self, forks: bool = True) -> None:
        leave_outer_run(os.environ)
        folder, rank = os.environ.get(RUN_DIR_VARIABLE), launched_rank(os.environ)
        run_dir = Path(folder) if folder else None
        self.is_alone = not is_launched(os.environ)
        if not self.is_alone:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a rank immediately, without a traceback
            if forks:
                become_reaper(run_dir, rank)
            mark_rank(os.environ)
        show_warnings(not rank or run_dir is not None)  # ``mpitrain run`` removes duplicates
        if run_dir is not None:
            set_output_prefix(rank or None)
        self.status = RankStatusFile(run_dir, rank)
        self._cluster: Cluster | None = None

    @property
    def cluster(self) -> Cluster:
        """All ranks; valid after ``start``."""
        assert self._cluster is not None
        return self._cluster

    def start(self) -> None:
        """Start MPI. Collective over all ranks."""
        self._cluster = Cluster()

    @contextlib.contextmanager
    def errors_end_the_run(self) -> Iterator[None]:
        """End this process, and if necessary the other ranks, if an exception leaves the block."""
        try:
            yield
        except BaseException as error:
            self.fail(error)

    def fail(self, error: BaseException) -> NoReturn:
        """Report an error and exit.

        A user's error is printed in one line, normally by one rank, and every rank exits with the ``exit_status`` of
        the error. After an unexpected exception, the rank that raised it ends all ranks with status 1.
        """
        if isinstance(error, UserError):
            self.status.set_failed(error, is_user_error=True)
            self._end(error)
        if isinstance(error, OtherRankFailed):
            time.sleep(5)  # the other rank prints its traceback, then ends this rank
            sys.exit(1)
        report = report_crash(self._cluster, error)
        self.status.set_failed(error, is_user_error=False, traceback=report)
        self._let_lower_ranks_report()
        print(report, file=sys.__stderr__, flush=True)
        if self._cluster is not None and self._cluster.size > 1:
            self._cluster.abort(1)
        sys.exit(1)

    def finish(self, stopped: bool) -> None:
        """Record that training has ended, and wait for the other ranks. Collective over all ranks."""
        self.status.set_done(stopped=stopped)
        self._await_others()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher may send it until this process has ended

    def _await_others(self) -> None:
        sys.stdout.flush()
        with _WAIT:
            # A launcher may kill the other ranks as soon as one exits with a nonzero status.
            self.cluster.comm.Barrier()
        if RUN_DIR_VARIABLE in os.environ:
            stop_server(os.environ[RUN_DIR_VARIABLE], wait=False)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # the launcher may send it until this process has ended

    def _end(self, error: UserError) -> NoReturn:
        """Print a user's error once, and exit: regularly if every rank has it, else by aborting the other ranks."""
        cluster = self._cluster
        if cluster is None or error.on_all_ranks or cluster.size == 1:
            if (launched_rank(os.environ) if cluster is None else cluster.rank) == 0:
                print(f"mpitrain: {error}", file=sys.__stderr__, flush=True)
            elif cluster is None:
                time.sleep(3)  # a launcher kills all ranks when one exits; leave time for rank 0 to print
        else:
            self._let_lower_ranks_report()
            print(f"mpitrain: {error} ({cluster.rank_description})", file=sys.__stderr__, flush=True)
            cluster.abort(error.exit_status)
        sys.exit(error.exit_status)

    def _let_lower_ranks_report(self) -> None:
        """Wait before an error is reported: if all ranks fail in the same way, the lowest rank ends the others."""
        time.sleep(0.0 if self._cluster is None else _BEFORE_REPORT_S * min(self._cluster.rank, 4))
        if self._cluster is not None and self.status.has_lower_rank_failed_alike():
            time.sleep(5)  # a launcher needs longer than usual to end this rank


def run_rank(parse: Callable[[], TrainRequest]) -> NoReturn:
    """Train on this rank, and exit with the status of the run; see ``Rank.fail``. Collective over all ranks.

    A run that was stopped before its last step, and has saved, exits with status 75.
    """
    rank = Rank()
    with rank.errors_end_the_run():
        rank.start()
        with rank.cluster.agree("reading the command line and the job file"):
            request = parse()
        with training_session(rank.cluster, request, rank.status) as session:
            if session.loop is not None:
                session.loop.run()
    rank.finish(session.stopped)
    sys.exit(STOPPED_EARLY if session.stopped else 0)
