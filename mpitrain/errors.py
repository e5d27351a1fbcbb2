"""Every exception that a user can see.

A ``UserError`` is caused by the user's input: one line on standard error, from one rank, and exit status 2.
Any other exception is a bug: one traceback, headed by its rank, and every rank exits.
"""

from __future__ import annotations


class UserError(Exception):
    """Invalid user input; the message states the user's value, the valid values and the fix.

    Args:
        on_all_ranks: Whether every rank raises the error, so that one rank may report it and all may exit regularly.
    """

    exit_status = 2
    on_all_ranks = False  # a class attribute, for users' subclasses whose constructor does not call this constructor

    def __init__(self, *args: object, on_all_ranks: bool = False) -> None:
        super().__init__(*args)
        self.on_all_ranks = on_all_ranks


class ConfigError(UserError):
    """A flag or an option of the run is not valid."""


class JobError(UserError):
    """The job file cannot be loaded, or its job is not consistent."""


class DataError(UserError):
    """A data file is missing, truncated or mislabelled, or does not match the job."""


class LaunchError(UserError):
    """The ranks cannot be started as requested, or were started by the wrong launcher."""


class CheckpointError(UserError):
    """A checkpoint cannot be read, or does not match the model."""


class RecordError(UserError):
    """A run directory, or a record in it, cannot be read or displayed."""


class DamagedCheckpoint(CheckpointError):
    """A checkpoint is corrupt or unreadable."""

    exit_status = 1


class RankMismatch(UserError):
    """The ranks disagree on something that must be the same everywhere."""


class CollectiveFailed(UserError, RuntimeError):
    """In the torch.distributed backend, an operation timed out, a rank ended, or ranks called different operations."""

    exit_status = 1


class HorovodInternalError(RuntimeError):
    """An operation of ``mpitrain.horovod`` failed, because the ranks disagree or a rank has ended."""


class DeviceError(UserError):
    """A GPU cannot be used, or its memory has run out."""

    exit_status = 1


class NonFiniteLoss(UserError):
    """The loss became NaN or infinite."""


class RunFailed(Exception):
    """A run that was started from Python failed. The message has the reason, and the rank's traceback if there is one.

    Attributes:
        reason: One line: the rank, its host, and what happened.
        rank: The rank that failed first; None if unknown.
        traceback: The traceback of the rank's exception; empty if there is none.
        run_dir: The run directory.
    """

    def __init__(self, reason: str, rank: int | None, traceback: str, run_dir: str) -> None:
        super().__init__(f"{reason}\n{traceback}".strip())
        self.reason, self.rank, self.traceback, self.run_dir = reason, rank, traceback, run_dir

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (self.reason, self.rank, self.traceback, self.run_dir)
