"""Command lines that name a program in place of a job file."""

from __future__ import annotations

import dataclasses
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from ..core.words import nearest
from ..errors import ConfigError
from ..plan import options as flags
from ..plan.config import FIELDS
from ..plan.launch_options import check_disk
from ..plan.option import flag
from ..plan.program import ProgramOptions, ProgramRequest, command_request, module_request, script_request
from ..plan.script import is_program

MODULE = click.Option(["-m", "--module"], is_flag=True, help="JOB is the name of a Python module, as in python -m.")
_NAMES = {field.name for field in dataclasses.fields(ProgramOptions)}


@dataclass(frozen=True)
class ProgramWords:
    """The arguments of a command that starts a program.

    Attributes:
        flags: The flags before the program.
        program: A script, a module or a command, followed by its arguments.
        is_module: Whether ``program`` begins with the name of a module.
        is_command: Whether ``program`` is a command.
    """

    flags: list[str]
    program: list[str]
    is_module: bool = False
    is_command: bool = False

    def request(self, options: ProgramOptions) -> ProgramRequest:
        """Return the request to execute the program with these options."""
        if self.is_command:
            return command_request(self.program, options)
        if self.is_module:
            return module_request(self.program[0], self.program[1:], options)
        return script_request(Path(self.program[0]), self.program[1:], options)


def own_options() -> list[click.Option]:
    """Return the options that only programs have."""
    return [option for option in flags.options_of(ProgramOptions) if option.name not in FIELDS]


def find_program(options: Sequence[click.Option], args: Sequence[str]) -> ProgramWords | None:
    """Split arguments at the program; None if the arguments name a job file, or nothing to start.

    Args:
        options: All flags that may stand before the program.

    Raises:
        click.UsageError: The arguments name a command without ``--``, or no module after ``-m``.
    """
    probe = click.Command("run", params=[*options], add_help_option=False)
    with click.Context(probe, ignore_unknown_options=True, allow_interspersed_args=False) as context:
        parser = probe.make_parser(context)
        parser.allow_interspersed_args = False
        values, rest, _ = parser.parse_args(list(args))
    at = len(args) - len(rest)
    before, program = list(args[:at]), list(rest)
    if before[-1:] == ["--"]:
        return ProgramWords(before[:-1], program, is_command=True)
    if values.get("module") and not program:
        raise click.UsageError("there is no module after -m; give one, such as -m package.train")
    if not program or program[0].startswith("-"):
        return None
    program = [program[0], *arguments_in(program[1:])]
    if values.get("module"):
        return ProgramWords(before, program, is_module=True)
    path = Path(program[0])
    if path.suffix != ".py" and path.is_file():
        raise click.UsageError(f"{path} is not a Python file: to start a command, put -- before it, as in -- {path}")
    if path.suffix != ".py" and not path.exists() and shutil.which(program[0]) is not None:
        raise click.UsageError(f"{path} is a command: put -- before it, as in -- {shlex.join(program[:2])}")
    return ProgramWords(before, program) if is_program(path) else None


def arguments_in(words: list[str]) -> list[str]:
    """Return the arguments of a script or module; as with torchrun, a ``--`` directly after it is not one of them."""
    return words[1:] if words[:1] == ["--"] else words


def parse_flags(options: Sequence[click.Option], words: Sequence[str]) -> dict[str, Any]:
    """Return the values of all these options and of the options of programs; options of jobs are refused.

    Raises:
        ConfigError: An option is valid for jobs only.
    """
    own = [option for option in options if option.name not in _NAMES]
    command = click.Command("run", params=[*own, *flags.options_of(ProgramOptions)], add_help_option=False)
    jobs = {
        name: option for option in [*flags.run_options(), flags.CONFIG] for name in option.opts + option.secondary_opts
    }
    with click.Context(command) as context:
        try:
            command.parse_args(context, list(words))
        except click.NoSuchOption as error:
            name = error.option_name.partition("=")[0]
            if name in jobs:
                raise ConfigError(
                    f"{name} is an option of jobs, but a program is started: remove it, or pass it to mpitrain.Trainer "
                    "or train in the script"
                ) from error
            near = nearest(name, [flag(str(option.name)) for option in command.params])
            raise click.NoSuchOption(name, possibilities=[near] if near else None) from error
        return dict(context.params)


def program_options(values: dict[str, Any]) -> ProgramOptions:
    """Return the options of a program among the values of flags."""
    return ProgramOptions(**{name: values[name] for name in _NAMES})


@click.command("exec", epilog=flags.examples("mpirun -n 4 mpitrain exec -- python train.py --lr 0.1"))
@click.argument("program", nargs=-1, type=click.UNPROCESSED, metavar="-- COMMAND [ARGUMENTS]...")
def exec_command(program: tuple[str, ...], **values: Any) -> ProgramRequest:
    """Execute a program on this rank, under mpirun or srun.

    The program gets the environment variables that torchrun sets. mpitrain run uses this command.
    """
    return command_request(program, program_options(values))


exec_command.params = [*flags.options_of(ProgramOptions), *exec_command.params]
exec_command.allow_interspersed_args = False


@click.command("stage", epilog=flags.examples("srun --ntasks-per-node 1 mpitrain stage /tmp"))
@click.argument("folder", type=click.Path(path_type=Path))
def stage_command(folder: Path) -> int:
    """Copy the Python environment to FOLDER on a disk of every host, under mpirun or srun.

    Prints the path of the copy's Python, from which ranks start faster than from a file system that many hosts share.
    Copies that exist are used again. mpitrain run --stage-env uses this command.
    """
    from ..program.staging import stage

    check_disk(folder)
    return stage(folder)
