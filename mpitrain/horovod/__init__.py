"""Horovod's PyTorch API over MPI; ``import mpitrain.horovod.torch as hvd`` imports it."""

from __future__ import annotations

from typing import Any, NoReturn

from ..errors import LaunchError


def run(*args: Any, **kwargs: Any) -> NoReturn:
    """Raise an error: unlike ``horovod.run``, mpitrain does not start ranks from a running program.

    Raises:
        LaunchError: Always; the message names the command that starts ranks.
    """
    raise LaunchError("horovod.run is not available; start the ranks with 'mpitrain run -n N SCRIPT'")
