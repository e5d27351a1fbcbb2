"""``mpitrain submit``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from ..launcher.batch.request import SubmitRequest, read_submit_options, submit_flags
from ..launcher.batch.submit import submit_job
from ..launcher.batch.sweep import combinations, free_options
from ..plan import options as flags
from ..plan.launch_options import LaunchOptions
from ..plan.request import Workload
from .help import HELP
from .job_command import JobCommand
from .program import MODULE, find_program, own_options, parse_flags, program_options


class SubmitCommand(JobCommand):
    """``mpitrain submit``: its flags are valid before and after JOB; after JOB, a job's flag of the same name wins.

    Args:
        submit: Called with the request; the command returns the result of this call.
    """

    def __init__(self, submit: Callable[[SubmitRequest], Any] = submit_job) -> None:
        description = "Start ranks in a batch job: write the script and submit it. JOB is as for mpitrain run."
        example = "mpitrain submit --nodes 2 --tasks-per-node 4 -t 2:00:00 jobs/mnist_mlp.py"
        super().__init__("submit", [*submit_flags(), MODULE], self._request, description, [example])
        self.params = [option for option in self.params if option not in self._own]
        self._program = own_options()
        self._submit = submit

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if ctx.resilient_parsing:  # for shell completion
            self.params = [*self._own, *self.params]
            return super().parse_args(ctx, args)
        if HELP.intersection(args):
            return super().parse_args(ctx, _split_options(self._own, args)[1])
        program = find_program([*self._own, *self._run, *self._program], args)
        if program is not None:
            self._check_flags(program.flags)
            own, words = _split_options(self._own, _join_values(self._program, program.flags))
            ctx.params = parse_flags(self._program, words)
            ctx.meta.update(own=self._own_values(own), program=program)
            return []
        self._check_flags(args[: next((at for at, word in enumerate(args) if word.endswith(".py")), len(args))])
        at = self._find_job(ctx, list(args))
        if at is None:
            raise click.MissingParameter(ctx=ctx, param=self.params[-1])
        if self.script_in(args) is not None:  # the arguments after the script are the script's own
            own, before = _split_options(self._own, _join_values(self._run, args[:at]))
            ctx.meta["own"] = self._own_values(own)
            return super().parse_args(ctx, [*before, *args[at:]])
        job = self._options_of(Path(args[at]))
        names = {option.name for option in job}
        self._check_flags(args[at + 1 :])
        own, before = _split_options(self._own, _join_values(self._run, args[:at]))
        more, after = _split_options(
            [option for option in self._own if option.name not in names],
            _join_values([*self._run, *job], args[at + 1 :]),
        )
        rest = super().parse_args(ctx, [*before, args[at], *after])
        ctx.meta["own"] = self._own_values(own, more)
        return rest

    def _check_flags(self, words: Sequence[str]) -> None:
        """Refuse flags that only ``mpitrain run`` has."""
        own = {flag for option in [*self._own, *self._run, *self._program] for flag in option.opts}
        of_run = {flag for option in flags.options_of(LaunchOptions) for flag in option.opts} - own
        for word in words:
            if (name := word.partition("=")[0]) in of_run:
                raise click.NoSuchOption(
                    name,
                    f"{name} is an option of mpitrain run, not of mpitrain submit; to use it in a batch job, submit a "
                    "script that calls mpitrain run, such as slurm/preemptible.sbatch, with sbatch",
                )

    def _request(self, **values: Any) -> Any:
        meta = click.get_current_context().meta
        resources, options = read_submit_options(
            {name: value for name, value in meta["own"].items() if name != "module"}
        )
        program = meta.get("program")
        workload: Workload = self.job_request(values) if program is None else program.request(program_options(values))
        is_job = program is None and "script_arguments" not in meta
        swept = [*self._run, *self._job] if is_job else free_options(options.sweep)
        points = combinations(options.sweep, swept) if options.sweep else []
        return self._submit(SubmitRequest(resources, options, workload, tuple(points)))

    def _options_of(self, path: Path) -> list[click.Option]:
        """Return a job's flags."""
        from ..plan.job import load_job_file

        return flags.job_options(path, load_job_file(path))

    def _own_values(self, *parsed: dict[str, Any]) -> dict[str, Any]:
        """Return the values of this command's own flags that the user has set."""
        values: dict[str, Any] = {}
        for words in parsed:
            for name, value in words.items():
                values[name] = [*values.get(name, []), *value] if isinstance(value, list) else value
        with click.Context(click.Command("submit")) as context:
            for option in self._own:
                option.handle_parse_result(context, values, [])
            return {name: value for name, value in context.params.items() if name in values}


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
