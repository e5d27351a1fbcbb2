"""A process as a rank that runs a script; the script may train, and continues afterwards."""

from __future__ import annotations

import atexit
import contextlib
import os
import runpy
import signal
import sys
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, ClassVar, NoReturn

from ..core import activity
from ..errors import ConfigError, LaunchError, UserError
from ..plan.config import RunConfig
from ..plan.script import ScriptRequest
from ..process.launcher_env import is_launched
from ..process.rank_status import RUN_DIR_VARIABLE
from ..process.signals import STOPPED_EARLY
from .rank import Rank

_EXITS_EARLY = "exits before training has ended; to finish early, call trainer.stop() in place of break or exit"


class ScriptRank(Rank):
    """This process as a rank in which a script runs; see ``Rank``.

    Attributes:
        options: The options on the command line, which override the options in the script.
        session: The training session that the script has not closed yet; None if there is none.
        servers_have_ended: Whether the ranks of parameter servers have ended, so that the script cannot train again.
    """

    _of_process: ClassVar[ScriptRank | None] = None

    def __init__(self, forks: bool = True) -> None:
        super().__init__(forks)
        ScriptRank._of_process = self
        self.options: dict[str, Any] = {}
        self.session: contextlib.ExitStack | None = None
        self.servers_have_ended = False
        self._has_failed = self._stopped = self._used_run_dir = False

    @classmethod
    def of_process(cls) -> ScriptRank:
        """Return the rank of this process, in which a script runs; start MPI if necessary. Collective over all ranks.

        From now on, an exception that ends the script on one rank ends all ranks.

        Raises:
            ConfigError: An earlier training in this script used parameter servers, whose ranks have ended. The
                error ends the run.
        """
        rank = cls._of_process
        if rank is None:
            if not is_launched(os.environ) and int(os.environ.get("WORLD_SIZE") or 1) > 1:
                raise LaunchError(
                    "torchrun has started this script, but mpitrain needs MPI ranks: start the script with "
                    "mpitrain run -n N script.py, or with mpirun or srun"
                )
            rank = cls(forks=not _has_threads())
            sys.excepthook = rank._fail_alone if rank.is_alone else lambda _, error, __: rank.fail(error)
        if rank._cluster is None:
            with rank.errors_end_the_run():
                rank.start()
            atexit.register(rank._check_exit)
        if rank.servers_have_ended:
            with rank.errors_end_the_run():
                raise ConfigError(
                    "the parameter servers ended after the script's first training: train only once "
                    "with --ps, or start a script for each training"
                )
        return rank

    @contextlib.contextmanager
    def errors_end_the_run(self) -> Iterator[None]:
        """See ``Rank``. Without a launcher, errors are left to the script or notebook; ``SystemExit`` always."""
        try:
            yield
        except BaseException as error:
            if self.is_alone or isinstance(error, SystemExit):
                raise
            self.fail(error)

    def fail(self, error: BaseException) -> NoReturn:
        self._has_failed = True
        if self.session is not None:
            session, self.session = self.session, None
            try:
                with session:
                    raise error
            except BaseException as located:
                error = located
        super().fail(error)

    def claim_run_dir(self, config: RunConfig) -> None:
        """Record that a training of the script begins.

        Raises:
            ConfigError: This training would resume an earlier training of the script, in the directory of ``mpitrain
                run``.
        """
        if config.run.run_dir is None and RUN_DIR_VARIABLE in os.environ:
            if self._used_run_dir:
                raise ConfigError(
                    "a second training in a script needs its own run directory: pass run_dir=...", on_all_ranks=True
                )
            self._used_run_dir = True

    def finish(self, stopped: bool) -> None:
        """Wait for the other ranks. The script continues; its exit ends the rank. Collective over all ranks."""
        self._stopped = stopped
        activity.set_limits(0.0, activity.LONG_LIMIT_S)
        self._await_others()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler if self.is_alone else signal.SIG_DFL)

    def _fail_alone(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        """Report an exception that ends a script without a launcher; report a user's error in one line."""
        if isinstance(error, UserError):
            self.fail(error)
        sys.__excepthook__(kind, error, traceback)

    def _check_exit(self) -> None:
        """Record that a script is done; end all ranks with status 1 if it exits in the middle of training."""
        if self.session is None:
            if not self._has_failed:
                self.status.set_done(stopped=self._stopped)
            return
        error = getattr(sys, "last_value", None)  # the exception, which Python has printed
        if error is None:
            error = RuntimeError(_EXITS_EARLY)
            print(f"mpitrain: {self.cluster.rank_description}: {_EXITS_EARLY}", file=sys.__stderr__, flush=True)
        with contextlib.suppress(BaseException), self.session:  # which records that the run has failed
            raise error
        if self.is_alone:  # Open MPI would print several lines
            sys.stdout.flush()
            os._exit(1)
        self.cluster.abort(1)


def _has_threads() -> bool:
    """Return whether this process has several threads: a forked child process, as the rank, would lack them."""
    return len(os.listdir("/proc/self/task")) > 1


def run_script(parse: Callable[[], ScriptRequest]) -> NoReturn:
    """Run a script on this rank, and exit with its status. Collective over all ranks if it trains."""
    rank = ScriptRank()
    try:
        request = parse()
        rank.options = request.options
        sys.argv = [str(request.path), *request.arguments]
        sys.path[0] = str(request.path.parent.absolute())
        runpy.run_path(str(request.path), run_name="__main__")
    except SystemExit as error:
        if error.code not in (None, 0, STOPPED_EARLY) and not rank._has_failed:  # the script's own status
            rank._has_failed = True
            rank.status.set_failed(error, is_user_error=False)
        raise
    except BaseException as error:
        rank.fail(error)
    if rank._cluster is None:  # the rank has not trained
        rank.status.set_done(stopped=False)
    sys.exit(0)
