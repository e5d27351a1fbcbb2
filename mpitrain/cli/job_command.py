"""Commands whose flags depend on a job file."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from ..core.words import nearest
from ..errors import ConfigError, UserError
from ..plan import options as flags
from ..plan.request import JobRequest
from ..plan.script import ScriptRequest, is_script
from .help import help_all_option, write_options
from .program import arguments_in

if TYPE_CHECKING:
    from ..plan.job import JobFunction
    from ..training.setup import TrainRequest

JOB_HELP = (
    "JOB is a job file, followed by its options; or a script that uses mpitrain.train or mpitrain.Trainer, followed by "
    "its own command line."
)


class JobCommand(click.Command):
    """A command whose flags depend on its job file: the run's options and the job's own options."""

    def __init__(
        self,
        name: str,
        own: Sequence[click.Option],
        callback: Callable[..., Any],
        help: str,
        examples: Sequence[str],
        **defaults: Any,
    ) -> None:
        self._own = list(own)
        self._help_all = help_all_option()
        self._defaults = defaults
        self._run = [*flags.run_options(**defaults), flags.CONFIG]
        self._job: list[click.Option] = []
        self._program: list[click.Option] = []  # options that only programs have, if the command starts programs
        self.function: JobFunction | None = None
        job = click.Argument(["job_file"], type=flags.PATH, metavar="JOB")
        params = [*self._own, *self._run, self._help_all, job]
        super().__init__(name, params=params, callback=callback, help=help, epilog=flags.examples(*examples))

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        # A shell also completes command lines that are not valid yet.
        ignored = (UserError, click.UsageError) if ctx.resilient_parsing else ()
        with contextlib.suppress(*ignored):
            args = self._take_script_arguments(ctx, args)
            self._add_job_options(ctx, args)
        return super().parse_args(ctx, args)

    def script_in(self, args: Sequence[str]) -> int | None:
        """Return the index of a script in the arguments; None if they are invalid, or name no script."""
        with contextlib.suppress(click.UsageError), click.Context(self) as context:
            at = self._find_job(context, list(args))
            return at if at is not None and is_script(Path(args[at])) else None
        return None

    def _take_script_arguments(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Return the arguments up to a script; the arguments after it are the script's own."""
        at = self.script_in(args)
        if at is None:
            return args
        ctx.meta["script_arguments"] = arguments_in(args[at + 1 :])
        return args[: at + 1]

    def _add_job_options(self, ctx: click.Context, args: list[str]) -> None:
        """Load the job file, if the arguments name one, and read the ``--config`` file of a job or script."""
        at = self._find_job(ctx, list(args))
        if at is not None and "script_arguments" in ctx.meta:
            ctx.default_map = self._config_file(ctx, list(args))
        elif at is not None:
            from ..plan.job import load_job_file

            path = Path(args[at])
            self.function = load_job_file(path)
            self._job = flags.job_options(path, self.function)
            self.params += self._job
            ctx.default_map = self._config_file(ctx, list(args))

    def _find_job(self, ctx: click.Context, args: list[str]) -> int | None:
        """Return the index of the job file: the first argument that is neither a flag nor a flag's value."""
        probe = click.Command(self.name, params=[*self._own, *self._run, self._help_all])
        probe.allow_interspersed_args = False
        with click.Context(probe, ignore_unknown_options=True, allow_interspersed_args=False) as context:
            _, rest, _ = probe.make_parser(context).parse_args(list(args))
        if rest and rest[0].startswith("-"):
            name = rest[0].split("=")[0]
            near = nearest(name, [word for option in [*self._own, *self._run, *self._program] for word in option.opts])
            hint = f", did you mean {near}?" if near else "; put a job's options after JOB"
            if near == name:
                hint = "; it is an option for programs"
            raise click.NoSuchOption(name, f"{name}: no such option before JOB{hint}")
        return len(args) - len(rest) if rest else None

    def _config_file(self, ctx: click.Context, args: list[str]) -> dict[str, Any]:
        """Return the options in the ``--config`` file, which must be read before the other flags are parsed."""
        with click.Context(self, resilient_parsing=True) as context:
            options, _, _ = self.make_parser(context).parse_args(args)
        if not options.get("config"):
            return {}
        read = flags.read_config_file(Path(str(options["config"])), [*self._run, *self._job])
        return flags.without_overridden(read, options)

    def job_request(self, values: Mapping[str, Any]) -> JobRequest:
        """Return the job or script to run, from the values of all flags of the current command."""
        script = click.get_current_context().meta.get("script_arguments")
        return JobRequest(
            values["job_file"],
            {**self._defaults, **given_options(self._run, values)},
            given_options(self._job, values),
            None if script is None else tuple(script),
        )

    def request(self, values: Mapping[str, Any]) -> TrainRequest | ScriptRequest:
        """Return the values of all flags of the current command as a request for one rank."""
        job, function = self.job_request(values), self.function
        if job.script_arguments is not None:
            return ScriptRequest(job.path, list(job.script_arguments), dict(job.options), job.config)
        assert function is not None
        from ..plan.job import make_job
        from ..training.setup import TrainRequest

        arguments = {str(option.name): values[str(option.name)] for option in self._job}
        make = functools.partial(make_job, job.path, function, arguments, job.config.training.seed)
        return TrainRequest(job.path, arguments, job.config, make)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        help_option = self.get_help_option(ctx)
        assert help_option is not None
        options = [*self._job, *self._own, *self._run, *self._program, self._help_all, help_option]
        write_options(ctx, formatter, options)


def given_options(options: Sequence[click.Option], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of those options of the current command that do not have their defaults."""
    context = click.get_current_context()
    names = [str(option.name) for option in options if option is not flags.CONFIG]
    default = ParameterSource.DEFAULT
    return {name: values[name] for name in names if context.get_parameter_source(name) is not default}


def current_command() -> JobCommand:
    """Return the command that is being executed."""
    command = click.get_current_context().command
    assert isinstance(command, JobCommand)
    return command


def job_file_request(values: Mapping[str, Any]) -> TrainRequest:
    """Return the values of all flags of the current command as a request for one rank.

    Raises:
        ConfigError: The command names a script in place of a job file.
    """
    request = current_command().request(values)
    if isinstance(request, ScriptRequest):
        raise ConfigError(f"{request.path} is a script, not a job file: give a job file")
    return request


def train_command() -> JobCommand:
    """Return ``mpitrain train``, the command that every rank runs."""
    about = f"Train on this rank; ranks that mpirun or srun has started train together. {JOB_HELP}"
    example = "mpirun -n 4 mpitrain train jobs/mnist_mlp.py --mode async"
    return JobCommand("train", [], lambda **values: current_command().request(values), about, [example])
