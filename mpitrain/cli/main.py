"""The start of every command and rank: which modules it imports, and what errors print."""

from __future__ import annotations

import errno
import gc
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import click

from ..core.words import nearest
from ..errors import ConfigError, UserError
from ..monitor.console import print_wrapped
from ..monitor.rank_log import show_warnings
from ..plan.roles import HOW_ROLES_ARE_GIVEN
from ..process import stream_client
from ..process.fork_server import SOCKET, SPARE, keep_server, start_server
from ..process.launcher_env import MAX_RESTARTS, RESTART_COUNT
from ..process.rank_status import RUN_DIR_VARIABLE, imports
from ..process.standard_streams import discard, open_closed_streams, use_null
from ..version import __version__
from .help import HELP, HelpFormatter
from .job_command import train_command

# Flags by which scripts for TensorFlow's parameter servers give each process its role.
_TENSORFLOW_ROLES = ("--job_name", "--task_index", "--ps_hosts", "--worker_hosts")
# For each command: its module, the name of the command (or of the function that returns it), and a line of help.
_COMMANDS = {
    "demo": ("cli.run", "demo_command", "Train a small model on two ranks, to try mpitrain out."),
    "init": ("cli.init", "init_command", "Write a job, a batch script and a test, to start a project from."),
    "run": ("cli.run", "RunCommand", "Start ranks that train, or execute any program."),
    "horovodrun": ("cli.horovodrun", "horovodrun_command", "Start ranks with the flags of Horovod's launcher."),
    "exec": ("cli.program", "exec_command", "Execute a program on this rank, under mpirun or srun."),
    "train": ("cli.job_command", "train_command", "Train on this rank, under mpirun or srun; or alone."),
    "stage": ("cli.program", "stage_command", "Copy the Python environment to a disk of every host."),
    "probe": ("cli.probe", "probe_command", "Measure a job, for predictions of its speed."),
    "measure": ("cli.probe", "measure_command", "Measure on this rank, for probe; under mpirun or srun."),
    "simulate": ("cli.simulate", "simulate_command", "Predict a job's speed on other ranks, links and modes."),
    "tune": ("cli.tune", "tune_command", "Choose a job's options by prediction and measurement."),
    "submit": ("cli.submit", "SubmitCommand", "Train in a batch job: write the script and submit it."),
    "data": ("cli.data", "data_command", "Show a job's examples, and whether loading or computing limits the speed."),
    "placement": ("cli.placement", "placement_command", "Print which server holds which variable, without training."),
    "doctor": ("doctor.command", "doctor_command", "Check whether this machine can train."),
    "runs": ("report.runs", "runs_command", "List the runs in a folder: job, mode, ranks, step, state, age."),
    "scale": ("cli.run", "scale_command", "Continue a live run on other ranks or hosts."),
    "stop": ("cli.run", "stop_command", "Let a run save and end, from any host."),
    "watch": ("report.watch", "watch_command", "Show a live view of a run in the terminal."),
    "stacks": ("report.stacks", "stacks_command", "Show what every rank of a live run is doing."),
    "report": ("report.page", "report_command", "Write a web page about runs."),
    "evaluate": ("cli.inference", "evaluate", "Measure loss and accuracy of a trained model."),
    "predict": ("cli.inference", "predict", "Write a trained model's outputs for examples."),
    "verify": ("cli.checkpoints", "verify", "Check that checkpoints are undamaged."),
    "inspect": ("cli.checkpoints", "inspect", "Print the contents of a checkpoint."),
    "diff": ("cli.checkpoints", "diff", "Compare two checkpoints."),
    "export": ("cli.checkpoints", "export", "Write a checkpoint's parameters in another format."),
}
# Errors of a full disk.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# The commands whose ranks may read standard input.
_READ_INPUT = {"run", "horovodrun", "exec", "train"}


class _Commands(click.Group):
    """The commands; each is imported only when it is used, because ranks and shell completion wait for the imports.

    If a Python file is given without a command, the error suggests ``mpitrain run``.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in _COMMANDS:
            return None
        module, attribute, _ = _COMMANDS[name]
        made = getattr(importlib.import_module(f"..{module}", __package__), attribute)
        return made if isinstance(made, click.Command) else made()  # type: ignore[no-any-return]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, _, line) in _COMMANDS.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in _COMMANDS and not name.startswith("-") and not ctx.resilient_parsing:
            near = nearest(name, [*_COMMANDS])
            hint = f". Did you mean {near!r}?" if near else "; mpitrain --help lists the commands"
            if name.endswith(".py"):
                hint = f"; to train, run 'mpitrain run {name}'"
            raise click.UsageError(f"no such command {name!r}{hint}")
        return super().resolve_command(ctx, args)


_HELP = """Train on many MPI ranks.

\b
  mpitrain run -n 4 jobs/mnist_mlp.py                 start four ranks on this host
  mpitrain run -n 4 jobs/mnist_mlp.py --help          show the job's own options
  mpitrain run -n 4 train.py --lr 0.1                 start a script that uses torch.distributed
  mpitrain run -n 4 -- ./program ARGUMENTS            start any command
  mpirun -n 4 mpitrain train jobs/mnist_mlp.py        start the ranks by hand
  mpitrain submit --nodes 2 jobs/mnist_mlp.py         run as a batch job
  mpitrain watch runs/mnist_mlp-20261121-141119       watch a run
"""


def _exec(arguments: list[str]) -> int:
    from ..program.rank import exec_program
    from .program import exec_command

    try:
        request = invoke(exec_command, arguments)
    except UserError as error:
        print_wrapped(f"mpitrain: {error}")
        return error.exit_status
    exec_program(request)


def commands() -> click.Group:
    """Return the ``mpitrain`` command with all of its commands."""
    return click.version_option(__version__, prog_name="mpitrain")(_Commands("mpitrain", help=_HELP))


def _measure(arguments: list[str]) -> NoReturn:
    from ..probe.rank import run_probe
    from .probe import measure_command

    run_probe(lambda: invoke(measure_command(), arguments))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the ``mpitrain`` command and return its exit status."""
    open_closed_streams()
    stream_client.connect()
    arguments = list(sys.argv[1:] if argv is None else argv)
    if argv is None and not _READ_INPUT.intersection(arguments[:1]):
        use_null(0)
    # An error that occurs on every rank is printed once, so 'train' parses its flags only after MPI has started.
    if arguments[:1] == ["train"] and not HELP.intersection(arguments):
        gc.disable()  # the objects of modules stay
        try:
            from ..training.first_server import serve
            from ..training.rank import run_rank
            from ..training.script_rank import run_script
        except UserError as error:  # there is no usable MPI library
            print_wrapped(f"mpitrain: {error}")
            return error.exit_status
        finally:
            gc.freeze()
            gc.enable()
        if SOCKET in os.environ:
            serve(main)
        if int(os.environ.get(MAX_RESTARTS, "0")) and RUN_DIR_VARIABLE in os.environ:
            is_restart = os.environ.get(RESTART_COUNT, "0") != "0"
            start_server(os.environ[RUN_DIR_VARIABLE], is_restart, main)
            if SPARE in os.environ:
                run_dir = os.environ[RUN_DIR_VARIABLE]
                return keep_server(run_dir, imports(Path(run_dir)))
        command = train_command()
        if command.script_in(arguments[1:]) is not None:
            run_script(lambda: invoke(command, arguments[1:]))
        run_rank(lambda: invoke(command, arguments[1:]))
    if arguments[:1] == ["measure"] and not HELP.intersection(arguments):
        _measure(arguments[1:])
    if arguments[:1] == ["exec"] and "--help" not in arguments[:2]:
        return _exec(arguments[1:])
    if arguments[:1] in (["run"], ["horovodrun"], ["probe"], ["tune"]):
        show_warnings(False)  # the ranks show the warnings that the job file causes
    elif signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # 'run' installs its own handler
    click.Context.formatter_class = HelpFormatter
    try:
        status = int(invoke(commands(), arguments) or 0)
        sys.stdout.flush()
        return status
    except UserError as error:
        print_wrapped(f"mpitrain: {error}")
        return error.exit_status
    except OSError as error:
        if error.errno not in _FULL:
            raise
        discard(sys.stdout)  # what is buffered would be written once more at the exit
        print_wrapped(f"mpitrain: the output cannot be written: {error.strerror}")
        return UserError.exit_status
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


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
