"""The output of ``--help``: options in groups, the common options or all options."""

from __future__ import annotations

from collections.abc import Iterable

import click

_HYPHEN = "\N{NON-BREAKING HYPHEN}"
_SHOWS_ALL = "mpitrain.shows_all_options"  # key in the context's meta
_WIDEST_FLAG = 25  # wider flags have a line of their own
HELP = frozenset(["--help", "--help-all"])


class HelpFormatter(click.HelpFormatter):
    """Wraps text between words only: click's formatter also wraps at the hyphens inside of flags."""

    def write_dl(self, rows: Iterable[tuple[str, str]], col_max: int = 30, col_spacing: int = 2) -> None:
        super().write_dl([(first, _unbroken(second)) for first, second in rows], col_max, col_spacing)

    def write_text(self, text: str) -> None:
        super().write_text(_unbroken(text))

    def getvalue(self) -> str:
        return super().getvalue().replace(_HYPHEN, "-")


def _unbroken(text: str) -> str:
    return text.replace("-", _HYPHEN)


def help_all_option() -> click.Option:
    """Return the flag ``--help-all``."""
    return click.Option(
        ["--help-all"], is_flag=True, is_eager=True, expose_value=False, callback=_show_all, help="Show all options."
    )


def _show_all(context: click.Context, option: click.Parameter, value: bool) -> None:
    if value and not context.resilient_parsing:
        context.meta[_SHOWS_ALL] = True
        click.echo(context.get_help(), color=context.color)
        context.exit()


def write_options(context: click.Context, formatter: click.HelpFormatter, options: Iterable[click.Option]) -> None:
    """Write the common options, or all options after ``--help-all``, in groups; options without a group come last."""
    shown = [option for option in options if getattr(option, "is_common", True) or _SHOWS_ALL in context.meta]
    records = {option: record for option in shown if (record := option.get_help_record(context)) is not None}
    width = max(len(flag) for flag, _ in records.values() if len(flag) <= _WIDEST_FLAG)
    groups: dict[str, list[tuple[str, str]]] = {}
    for option, (flag, text) in records.items():
        groups.setdefault(getattr(option, "group", ""), []).append((flag.ljust(width), text))
    last = groups.pop("", [])
    for title, rows in [*groups.items(), ("Other options", last)]:
        with formatter.section(title):
            formatter.write_dl(rows, width)
