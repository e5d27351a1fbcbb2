"""``mpitrain run``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..plan import options as flags
from ..plan.launch_options import LaunchOptions
from ..plan.request import LaunchRequest
from .job_command import JOB_HELP, JobCommand


class RunCommand(JobCommand):
    """``mpitrain run``.

    Args:
        start: Called with the request; its result is the command's.
    """

    def __init__(self, start: Callable[[LaunchRequest], Any] | None = None) -> None:
        description = f"Start ranks with the mpirun that mpi4py was built for, and train. {JOB_HELP}"
        super().__init__("run", flags.options_of(LaunchOptions), self._launch, description)
        self._start = start or _supervise

    def _launch(self, **values: Any) -> Any:
        options = LaunchOptions(**{str(option.name): values[str(option.name)] for option in self._own})
        return self._start(LaunchRequest(options, self.job_request(values)))


def _supervise(request: LaunchRequest) -> int:
    from ..launcher.supervisor import run

    return run(request)
