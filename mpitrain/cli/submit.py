"""``mpitrain submit``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from ..errors import ConfigError
from ..launcher.batch.site import find_site, read_site
from ..launcher.batch.submit import SubmitRequest, submit_job, submit_options
from ..plan import options as flags
from .invoke import invoke
from .job_command import JobCommand, train_command


class SubmitCommand(JobCommand):
    """``mpitrain submit``: its own flags are valid before and after JOB; after JOB, a job's flag of that name wins.

    Args:
        submit: Called with this command's own flags and the request; its result is the command's.
    """

    def __init__(self, submit: Callable[[Mapping[str, Any], SubmitRequest], Any] = submit_job) -> None:
        about = "Train in a batch job: write the script and submit it."
        super().__init__("submit", submit_options(), self._request, about)
        self.params = [option for option in self.params if option not in self._own]
        self._submit = submit

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if ctx.resilient_parsing:  # for shell completion
            self.params = [*self._own, *self.params]
            return super().parse_args(ctx, args)
        if "--help" in args:
            return super().parse_args(ctx, _split_options(self._own, args)[1])
        at = self._find_job(ctx, list(args))
        if at is None:
            raise click.MissingParameter(ctx=ctx, param=self.params[-1])
        if self.script_in(args) is not None:
            raise click.UsageError(
                f"{args[at]} is a script, not a job file: start it with srun in a script of your own"
            )
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

    def _request(self, **values: Any) -> Any:
        context = click.get_current_context()
        request = self.request(values)
        seeded = context.get_parameter_source("seed") is not click.core.ParameterSource.DEFAULT
        run_dir = [option for option in self.sweepable() if option.name == "run_dir"]
        _, arguments = _split_options(run_dir, context.meta["rank_arguments"])  # the script sets it

        def check(words: Sequence[str]) -> None:
            invoke(train_command(), [*arguments, *words])

        submit_request = SubmitRequest(request.name, self.sweepable(), arguments, request.config, seeded, check)
        return self._submit(context.meta["own"], submit_request)

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
