"""Run a click command and turn its errors into one line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from ..errors import ConfigError
from ..plan.roles import HOW_ROLES_ARE_GIVEN

# Flags by which scripts for TensorFlow's parameter servers give each process its role.
_TENSORFLOW_ROLES = ("--job_name", "--task_index", "--ps_hosts", "--worker_hosts")


def invoke(command: click.Command, arguments: Sequence[str]) -> Any:
    """Run a command; turn a click error into a one-line ``ConfigError``."""
    try:
        return command.main(list(arguments), prog_name="mpitrain", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        print(error.format_message())
        return 0
    except click.ClickException as error:
        text = " ".join(error.format_message().split())
        if isinstance(error, click.NoSuchOption) and error.option_name in _TENSORFLOW_ROLES:
            text += f"{'' if text[-1] in '.?' else '.'} {HOW_ROLES_ARE_GIVEN}"
        raise ConfigError(text[:1].lower() + text[1:]) from error
    except click.Abort:
        raise KeyboardInterrupt from None
