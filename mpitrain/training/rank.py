"""A process as a rank: from its start to the regular exit, or to the end of all ranks after an error."""

from __future__ import annotations

import atexit
import contextlib
import os
import runpy
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, NoReturn

from ..comm.cluster import Cluster, OtherRankFailed, report_crash
from ..core import activity
from ..errors import ConfigError, LaunchError, UserError
from ..monitor.rank_log import show_warnings
from ..monitor.trace import span
from ..plan.config import RunConfig
from ..plan.script import ScriptRequest
from ..process.fork_server import stop_server
from ..process.launcher_env import is_launched, launched_rank
from ..process.output_prefix import set_output_prefix
from ..process.rank_status import RUN_DIR_VARIABLE, RankStatusFile
from ..process.reaper import become_reaper
from ..process.signals import STOPPED_EARLY
from .session import TrainRequest, training_session

_WAIT = span("wait")
_EXITS_EARLY = "exits before training has ended; to finish early, call trainer.stop() in place of break or exit"
_BEFORE_REPORT_S = 0.5  # for each of up to four lower ranks


class Rank:
    """This process as a rank.

    Construction starts the rank's reaper if a launcher started the rank, and registers with ``mpitrain run`` if that
    did. Call ``start`` next.

    Args:
        forks: Whether this process may become the reaper, and a child of it the rank.

    Attributes:
        status: What ``mpitrain run`` knows about this rank.
        is_alone: Whether no launcher has started this process.
        options: The options on the command line, which replace those of a script.
        session: The training session that a script has not closed yet; None if there is none.
        servers_have_ended: Whether the ranks of parameter servers have ended, so that the script cannot train again.
    """

    current: ClassVar[Rank | None] = None  # of a script

    def __init__(self, forks: bool = True) -> None:
        given, rank = os.environ.get(RUN_DIR_VARIABLE), launched_rank(os.environ)
        run_dir = Path(given) if given else None
        self.options: dict[str, Any] = {}
        self.session: contextlib.ExitStack | None = None
        self.servers_have_ended = False
        self.is_alone = not is_launched(os.environ)
        if not self.is_alone:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a rank immediately, without a traceback
            if forks:
                become_reaper(run_dir, rank)
        show_warnings(not rank or run_dir is not None)  # ``mpitrain run`` removes duplicates
        if run_dir is not None:
            set_output_prefix(rank or None)
        self.status = RankStatusFile(run_dir, rank)
        self._cluster: Cluster | None = None
        self._failed = self._stopped = self._used_run_dir = False

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
            if self.current is self and (self.is_alone or isinstance(error, SystemExit)):
                raise  # the script or the notebook handles it
            self.fail(error)

    def fail(self, error: BaseException) -> NoReturn:
        """Report an error and exit.

        A user's error is printed by one rank, in one line, and every rank exits with status 2. After an unexpected
        exception, the rank that raised it ends all ranks with status 1.
        """
        self._failed = True
        if self.session is not None:
            session, self.session = self.session, None
            try:
                session.__exit__(type(error), error, error.__traceback__)
            except BaseException as located:
                error = located
        if isinstance(error, UserError):
            self.status.set_failed(error, is_user_error=True)
            self._end(error)
        if isinstance(error, OtherRankFailed):
            time.sleep(5)  # the other rank prints its traceback, then ends this one
            sys.exit(1)
        report = report_crash(self._cluster, error)
        self.status.set_failed(error, is_user_error=False, traceback=report)
        self._let_lower_ranks_report()
        print(report, file=sys.__stderr__, flush=True)
        if self._cluster is not None and self._cluster.size > 1:
            self._cluster.abort(1)
        sys.exit(1)

    def _fail_alone(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        """Report an exception that ends a script without a launcher: errors of its user in one line."""
        if isinstance(error, UserError):
            self.fail(error)
        sys.__excepthook__(kind, error, traceback)

    def claim_run_dir(self, config: RunConfig) -> None:
        """Note that a training of a script begins.

        Raises:
            ConfigError: It would resume an earlier one of the same script, in the directory of ``mpitrain run``.
        """
        if config.run.run_dir is None and RUN_DIR_VARIABLE in os.environ:
            if self._used_run_dir:
                error = ConfigError("a second training in a script needs a directory of its own: pass run_dir=...")
                error.on_all_ranks = True
                raise error
            self._used_run_dir = True

    def finish(self, stopped: bool) -> None:
        """Record that training has ended, and wait for the other ranks. Collective over all ranks.

        A script continues, for as long as it likes: it is done when it exits.
        """
        if self.current is self:
            self._stopped = stopped
            activity.set_limits(0.0, activity.LONG_LIMIT_S)
        else:
            self.status.set_done(stopped=stopped)
        sys.stdout.flush()
        with _WAIT:
            # A launcher may kill the other ranks as soon as one exits with a nonzero status.
            self.cluster.comm.Barrier()
        if RUN_DIR_VARIABLE in os.environ:
            stop_server(os.environ[RUN_DIR_VARIABLE], wait=False)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # the launcher may send it until this process has ended
        if self.current is not self:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the same
            return
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the script continues
        signal.signal(signal.SIGINT, signal.default_int_handler if self.is_alone else signal.SIG_DFL)

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
        """Wait before an error is reported: if all ranks fail in the same way, the lowest ends the others meanwhile."""
        time.sleep(0.0 if self._cluster is None else _BEFORE_REPORT_S * min(self._cluster.rank, 4))

    @classmethod
    def of_script(cls) -> Rank:
        """Return the rank of this process, in which a script runs; start MPI if necessary. Collective over all ranks.

        From now on, an exception that ends the script on one rank ends all ranks.

        Raises:
            ConfigError: The script has trained with parameter servers before, whose ranks have ended; ends the run.
        """
        rank = cls.current
        if rank is None:
            if not is_launched(os.environ) and int(os.environ.get("WORLD_SIZE") or 1) > 1:
                raise LaunchError(
                    "torchrun has started this script, and its ranks would train on their own: start it with "
                    "mpitrain run -n N script.py, or with mpirun or srun"
                )
            rank = cls.current = cls(forks=not _has_threads())
            sys.excepthook = rank._fail_alone if rank.is_alone else lambda _, error, __: rank.fail(error)
        if rank._cluster is None:
            with rank.errors_end_the_run():
                rank.start()
            atexit.register(rank._check_exit)
        if rank.servers_have_ended:
            with rank.errors_end_the_run():
                raise ConfigError(
                    "the parameter servers have ended with the script's first training: train once with --ps, or "
                    "start one script for each training"
                )
        return rank

    def _check_exit(self) -> None:
        """Record that a script is done; end all ranks with status 1 if it exits in the middle of training."""
        if self.session is None:
            if not self._failed:
                self.status.set_done(stopped=self._stopped)
            return
        error = getattr(sys, "last_value", None)  # that Python has printed
        if error is None:
            error = RuntimeError(_EXITS_EARLY)
            print(f"mpitrain: {self.cluster.rank_description}: {_EXITS_EARLY}", file=sys.__stderr__, flush=True)
        with contextlib.suppress(BaseException):
            self.session.__exit__(type(error), error, None)  # records that the run has failed
        if self.is_alone:  # Open MPI would print several lines
            sys.stdout.flush()
            os._exit(1)
        self.cluster.abort(1)


def _has_threads() -> bool:
    """Return whether this process has threads: they would not exist in the rank, its child."""
    return len(os.listdir("/proc/self/task")) > 1


def run_script(parse: Callable[[], ScriptRequest]) -> NoReturn:
    """Run a script on this rank, and exit with its status. It may train, and is then collective over all ranks."""
    rank = Rank.current = Rank()
    try:
        request = parse()
        rank.options = request.options
        sys.argv = [str(request.path), *request.arguments]
        sys.path[0] = str(request.path.parent.absolute())
        runpy.run_path(str(request.path), run_name="__main__")
    except SystemExit as error:
        if error.code not in (None, 0, STOPPED_EARLY) and not rank._failed:  # the script's own status
            rank._failed = True
            rank.status.set_failed(error, is_user_error=False)
        raise
    except BaseException as error:
        rank.fail(error)
    if rank._cluster is None:  # it has not trained
        rank.status.set_done(stopped=False)
    sys.exit(0)


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
