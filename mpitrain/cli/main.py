"""The ``mpitrain`` commands and how their errors are printed."""

from __future__ import annotations

import contextlib
import inspect
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import docstring_parser

from ..doctor.command import doctor_command
from ..errors import ConfigError, UserError
from ..launcher.batch.site import find_site, read_site
from ..launcher.batch.submit import SubmitRequest, submit_job, submit_options
from ..monitor.rank_log import show_warnings
from ..plan import options as flags
from ..plan.config import RunConfig
from ..plan.roles import HOW_ROLES_ARE_GIVEN
from ..process.standard_streams import open_closed_streams
from ..report.page import report_command
from ..report.runs import runs_command
from ..report.stacks import stacks_command
from ..report.watch import watch_command
from ..version import __version__
from . import checkpoints as checkpoint_commands

if TYPE_CHECKING:
    from ..plan.job import JobFunction
    from ..training.rank import TrainRequest

_CONFIG = flags.option(
    "--config", type=flags.PATH, metavar="FILE", help="Read options from a TOML file; flags override it."
)
_RANKS_HELP = "Number of ranks.  [default: all slots of --hosts, or all tasks of the allocation; else 1]"
_NETWORK_HELP = "Network between the hosts: a subnet such as 10.1.0.0/16, or an interface name."
_RESTARTS_HELP = "Restart from the newest checkpoint after a rank or host has died, at most N times."
_MIN_RANKS_HELP = "Restart without lost hosts if the remaining hosts have slots for at least M ranks."
_LINK_HELP = "End the ranks if another host has not answered for S seconds."
_ENV_HELP = "Set a variable for the ranks; may be repeated."
_ARGS_HELP = "Extra arguments for mpirun, quoted as in a shell."
_AGENT_HELP = "Program that starts processes on other hosts.  [default: ssh]"
_LAUNCH = [
    flags.option("-n", "--ranks", type=click.IntRange(min=1), help=_RANKS_HELP),
    flags.option("--hosts", metavar="HOST:RANKS,...", help="Hosts to run on.  [default: this host]"),
    flags.option("--hostfile", type=flags.PATH, metavar="FILE", help="File with the hosts, one per line."),
    flags.option("--remote-agent", metavar="PROGRAM", help=_AGENT_HELP),
    flags.option("--network", metavar="NET", help=_NETWORK_HELP),
    flags.option("--env", multiple=True, metavar="NAME[=VALUE]", help=_ENV_HELP),
    flags.option("--launcher-args", default="", metavar="WORDS", help=_ARGS_HELP),
    flags.option("--max-restarts", type=click.IntRange(min=0), default=0, metavar="N", help=_RESTARTS_HELP),
    flags.option("--min-ranks", type=click.IntRange(min=1), metavar="M", help=_MIN_RANKS_HELP),
    flags.option(
        "--link-timeout", type=click.FloatRange(min=5), default=30.0, show_default=True, metavar="S", help=_LINK_HELP
    ),
    flags.option("--dry-run", is_flag=True, help="Print the command without running it."),
]


# Flags by which scripts for TensorFlow's parameter servers give each process its role.
_TENSORFLOW_ROLES = ("--job_name", "--task_index", "--ps_hosts", "--worker_hosts")


class JobCommand(click.Command):
    """A command whose flags depend on its job file: the run's options and the job's own options."""

    def __init__(
        self, name: str, own: Sequence[click.Option], callback: Callable[..., Any], help: str, **defaults: Any
    ) -> None:
        self._own = list(own)
        self._run = [*flags.run_options(**defaults), _CONFIG]
        self._job: list[click.Option] = []
        self.function: JobFunction | None = None
        job = click.Argument(["job_file"], type=flags.PATH, metavar="JOB")
        super().__init__(name, params=[*self._own, *self._run, job], callback=callback, help=help)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        # A shell also completes command lines that are not valid yet.
        ignored = (UserError, click.UsageError) if ctx.resilient_parsing else ()
        with contextlib.suppress(*ignored):
            self._add_job_options(ctx, args)
        return super().parse_args(ctx, args)

    def _add_job_options(self, ctx: click.Context, args: list[str]) -> None:
        """Load the job file, if there is one among the arguments, and read the ``--config`` file."""
        at = self._find_job(ctx, list(args))
        if at is not None:
            from ..plan.job import load_job_file

            path = Path(args[at])
            self.function = load_job_file(path)
            self._job = flags.job_options(path, self.function)
            self.params += self._job
            ctx.default_map = self._config_file(ctx, list(args))

    def _find_job(self, ctx: click.Context, args: list[str]) -> int | None:
        """Return the index of the job file: the first argument that is neither a flag nor a flag's value."""
        probe = click.Command(self.name, params=[*self._own, *self._run])
        probe.allow_interspersed_args = False
        with click.Context(probe, ignore_unknown_options=True, allow_interspersed_args=False) as context:
            _, rest, _ = probe.make_parser(context).parse_args(list(args))
        if rest and rest[0].startswith("-"):
            name = rest[0].split("=")[0]
            raise click.NoSuchOption(name, f"{name}: no such option before JOB; put a job's options after JOB")
        return len(args) - len(rest) if rest else None

    def _config_file(self, ctx: click.Context, args: list[str]) -> dict[str, Any]:
        """Return the options in the ``--config`` file; it must be read before the other flags are parsed."""
        with click.Context(self, resilient_parsing=True) as context:
            options, _, _ = self.make_parser(context).parse_args(args)
        if not options.get("config"):
            return {}
        return flags.read_config_file(Path(str(options["config"])), [*self._run, *self._job])

    def request(self, values: dict[str, Any]) -> TrainRequest:
        """Return the values of all flags as a request for one rank."""
        from ..plan.job import make_job
        from ..training.rank import TrainRequest

        path, function = values["job_file"], self.function
        assert function is not None
        arguments = {str(option.name): values[str(option.name)] for option in self._job}
        run = [str(option.name) for option in self._run if option is not _CONFIG]
        config = RunConfig.of(**{name: values[name] for name in run})
        return TrainRequest(path, arguments, config, lambda: make_job(path, function, arguments))

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        about = "Options of the job"
        if self.function is not None:
            described = docstring_parser.parse(inspect.getdoc(self.function) or "").short_description
            about = f"Options of the job ({described})" if described else about
        help_option = self.get_help_option(ctx)
        for title, options in (
            ("Options", [*self._own, *([help_option] if help_option else [])]),
            (about, self._job),
            ("Options of the run", self._run),
        ):
            records = [r for r in (option.get_help_record(ctx) for option in options) if r is not None]
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


def _train(**values: Any) -> TrainRequest:
    command = click.get_current_context().command
    assert isinstance(command, JobCommand)
    return command.request(values)


def _run(**values: Any) -> int:
    from ..launcher.supervisor import Options, run

    options = Options(**{option.name: values.pop(option.name) for option in _LAUNCH if option.name is not None})
    request = _train(**values)  # reports invalid flags before any rank starts
    arguments = click.get_current_context().meta["rank_arguments"]
    return run(options, request.name, request.config, arguments)


def train_command() -> JobCommand:
    """Return ``mpitrain train``, the command that every rank runs."""
    return JobCommand("train", [], _train, "Train on this rank: under mpirun or srun on all of them, else alone.")


def _placement(**values: Any) -> int:
    from ..plan.plan import make_plan
    from .placement import placement_table

    request = _train(**values)
    job = request.make()
    config = request.config.merged({"batch_size": 1, "train_steps": job.train_steps})
    if not config.servers.ps:
        raise ConfigError("--ps 0: there is no server to place variables on; give --ps 1 or more")
    print(placement_table(make_plan(job, config, workers=2 + (config.parallel.backup_workers or 0))))
    return 0


def placement_command() -> JobCommand:
    """Return ``mpitrain placement``, which shows on which server each variable is placed."""
    about = "Print which server holds which variable, without training."
    return JobCommand("placement", [], _placement, about, mode="async", ps=1)


class RunCommand(JobCommand):
    """``mpitrain run``: also stores the arguments to pass on to the ranks."""

    def __init__(self) -> None:
        about = "Start ranks with the mpirun that mpi4py was built for, and train."
        super().__init__("run", _LAUNCH, _run, about)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        with click.Context(click.Command("run", params=list(self._own)), ignore_unknown_options=True) as context:
            context.resilient_parsing = True
            parser = context.command.make_parser(context)
            _, rest, _ = parser.parse_args(list(args))
        ctx.meta["rank_arguments"] = rest
        return super().parse_args(ctx, args)


class SubmitCommand(JobCommand):
    """``mpitrain submit``: its own flags are valid before and after JOB; after JOB, a job's flag of that name wins."""

    def __init__(self) -> None:
        super().__init__("submit", submit_options(), _submit, "Train in a batch job: write the script and submit it.")
        self.params = [option for option in self.params if option not in self._own]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if ctx.resilient_parsing:  # for shell completion
            self.params = [*self._own, *self.params]
            return super().parse_args(ctx, args)
        if "--help" in args:
            return super().parse_args(ctx, _split_options(self._own, args)[1])
        at = self._find_job(ctx, list(args))
        if at is None:
            raise click.MissingParameter(ctx=ctx, param=self.params[-1])
        job = self._options_of(Path(args[at]))
        names = {option.name for option in job}
        own, before = _split_options(self._own, _join_values(self._run, args[:at]))
        more, after = _split_options(
            [option for option in self._own if option.name not in names],
            _join_values([*self._run, *job], args[at + 1 :]),
        )
        ctx.meta["rank_arguments"] = [*before, args[at], *after]
        rest = super().parse_args(ctx, list(ctx.meta["rank_arguments"]))
        ctx.meta["own"] = self._own_values(own, more)
        return rest

    def sweepable(self) -> list[click.Option]:
        """Return the flags of the run and of the job."""
        return [*self._run, *self._job]

    def _options_of(self, path: Path) -> list[click.Option]:
        """Return a job's flags."""
        from ..plan.job import load_job_file

        return flags.job_options(path, load_job_file(path))

    def _own_values(self, *given: dict[str, Any]) -> dict[str, Any]:
        """Return the values of this command's own flags; the site file supplies those not given."""
        values: dict[str, Any] = {}
        for words in given:
            for name, value in words.items():
                values[name] = [*values.get(name, []), *value] if isinstance(value, list) else value
        site = find_site(Path(values["site"]) if "site" in values else None)
        defaults = {} if site is None else read_site(site, self._own)
        with click.Context(click.Command("submit"), default_map=defaults) as context:
            try:
                for option in self._own:
                    option.handle_parse_result(context, values, [])
            except click.BadParameter as error:
                if error.param is None or error.param.name in values:
                    raise
                raise ConfigError(f"{site}: {' '.join(error.format_message().split())}") from error
            return dict(context.params)


def _split_options(options: Sequence[click.Option], words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Split arguments into these options' values and the rest."""
    probe = click.Command("submit", params=list(options), add_help_option=False)
    with click.Context(probe, ignore_unknown_options=True) as context:
        values, rest, _ = probe.make_parser(context).parse_args(list(words))
    return values, rest


def _join_values(options: Sequence[click.Option], words: Sequence[str]) -> list[str]:
    """Join these options' flags with values such as -inf, which another parser would search for short flags."""
    takes_value = {name for option in options if not option.is_flag for name in option.opts}
    joined: list[str] = []
    for word in words:
        if joined and joined[-1] in takes_value and word.startswith("-"):
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


def _submit(**values: Any) -> int:
    context = click.get_current_context()
    command = context.command
    assert isinstance(command, SubmitCommand)
    request = command.request(values)
    seeded = context.get_parameter_source("seed") is not click.core.ParameterSource.DEFAULT
    run_dir = [option for option in command.sweepable() if option.name == "run_dir"]
    _, arguments = _split_options(run_dir, context.meta["rank_arguments"])  # the script sets it

    def check(words: Sequence[str]) -> None:
        _invoke(train_command(), [*arguments, *words])

    submit_request = SubmitRequest(request.name, command.sweepable(), arguments, request.config, seeded, check)
    return submit_job(context.meta["own"], submit_request)


class _Commands(click.Group):
    """The commands; a job file without a command is answered with the command that was probably meant."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0].endswith(".py") and not ctx.resilient_parsing:
            raise click.UsageError(f"no such command {args[0]!r}; to train, run 'mpitrain run {args[0]}'")
        return super().resolve_command(ctx, args)


_HELP = """Train on many MPI ranks.

\b
  mpitrain run -n 4 jobs/mnist_mlp.py                 start four ranks on this host
  mpitrain run -n 4 jobs/mnist_mlp.py --help          show the job's own options
  mpirun -n 4 mpitrain train jobs/mnist_mlp.py        start the ranks by hand
  mpitrain submit --nodes 2 jobs/mnist_mlp.py         run as a batch job
  mpitrain watch runs/mnist_mlp-20261121-141119       watch a run
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the ``mpitrain`` command and return its exit status."""
    open_closed_streams()
    arguments = list(sys.argv[1:] if argv is None else argv)
    # An error that every rank finds is printed once, so 'train' parses its flags only after MPI has started.
    if arguments[:1] == ["train"] and "--help" not in arguments:
        from ..training.rank import run_rank

        run_rank(lambda: _invoke(train_command(), arguments[1:]))
    if arguments[:1] == ["run"]:
        show_warnings(False)  # the ranks show those that the job file causes
    elif signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # 'run' installs its own handler
    commands: list[click.Command] = [RunCommand(), train_command(), SubmitCommand(), placement_command()]
    commands += [
        doctor_command,
        runs_command,
        watch_command,
        stacks_command,
        report_command,
        *checkpoint_commands.COMMANDS,
    ]
    group: click.Command = _Commands("mpitrain", help=_HELP, commands=commands)
    group = click.version_option(__version__, prog_name="mpitrain")(group)
    try:
        return int(_invoke(group, arguments) or 0)
    except UserError as error:
        print(f"mpitrain: {error}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _invoke(command: click.Command, arguments: Sequence[str]) -> Any:
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
