"""Every exception that a user can meet.

A ``UserError`` is the user's to mend: one line on standard error, from one rank, and exit status 2.
Anything else that escapes is a defect: one traceback, with its rank, and every rank ends.
"""

from __future__ import annotations


class UserError(Exception):
    """What was given cannot work; the message says what was given, what is valid, how to mend it."""

    exit_status = 2
    on_all_ranks = False  # whether every rank raises it, so that one may speak for all and all may end in order


class ConfigError(UserError):
    """A flag or an option of the run is not valid."""


class JobError(UserError):
    """The job file cannot be loaded, or its job is not consistent."""


class DataError(UserError):
    """A data file is missing, truncated or mislabelled, or does not fit the job."""


class LaunchError(UserError):
    """The ranks cannot be started as asked, or were started by the wrong launcher."""


class CheckpointError(UserError):
    """A checkpoint cannot be read, or does not fit the model."""


class RecordError(UserError):
    """A run directory, or a record in it, cannot be read or shown."""


class DamagedCheckpoint(CheckpointError):
    """A checkpoint cannot be read, or is not as it was written."""

    exit_status = 1


class RankMismatch(UserError):
    """The ranks disagree on something that must be the same everywhere."""


class DeviceError(UserError):
    """A GPU cannot be used, or its memory has run out."""

    exit_status = 1


class NonFiniteLoss(UserError):
    """The loss became NaN or infinite."""
