"""Flags from the types of a function's parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import click
import pytest

from mpitrain.cli.main import _COMMANDS, _Commands
from mpitrain.errors import ConfigError, JobError
from mpitrain.plan import options as flags
from mpitrain.plan.config import RunConfig


def parse(function, *words: str) -> dict[str, object]:
    command = click.Command("job", params=list(flags.job_options(Path("job.py"), function)), callback=lambda **v: v)
    return command.main(list(words), standalone_mode=False)


def many(
    count: int = 3,
    rate: float = 0.5,
    name: str = "x",
    folder: Path | None = None,
    fast: bool = False,
    kind: Literal["one", "two"] = "one",
    sizes: list[int] = [1, 2],  # noqa: B006
):
    """Do.

    Args:
        count: How many there are.
    """


def test_defaults_are_the_functions() -> None:
    assert parse(many) == {
        "count": 3,
        "rate": 0.5,
        "name": "x",
        "folder": None,
        "fast": False,
        "kind": "one",
        "sizes": [1, 2],
    }


def test_values_have_the_parameters_types() -> None:
    words = ["--count", "5", "--rate", "1e-3", "--folder", "/a b", "--fast", "--kind", "two", "--sizes", "4,5"]
    values = parse(many, *words)
    assert values == {
        "count": 5,
        "rate": 1e-3,
        "name": "x",
        "folder": Path("/a b"),
        "fast": True,
        "kind": "two",
        "sizes": [4, 5],
    }


def test_a_mistyped_value_is_answered_with_the_nearest() -> None:
    with pytest.raises(click.UsageError, match="'two'"):
        parse(many, "--kind", "tow")


@pytest.mark.parametrize("name", ["join", "run_dir"])
def test_an_empty_path_is_refused(name: str) -> None:
    """As of a shell variable that is not set: the current directory would be used."""
    command = click.Command("run", params=list(flags.run_options()))
    with pytest.raises(click.BadParameter, match="empty"):
        command.main([flags.flag(name), "", "job.py"], standalone_mode=False)
    with pytest.raises(ConfigError, match="empty"):
        flags.run_config({name: ""})


def test_help_comes_from_the_docstring() -> None:
    option = flags.job_options(Path("job.py"), many)[0]
    assert option.help == "How many there are."


def test_a_parameter_without_default_is_required() -> None:
    def needs(x: int): ...

    with pytest.raises(click.MissingParameter) as caught:
        parse(needs)
    assert "--x" in caught.value.format_message()


def test_types_without_a_form_on_the_command_line_are_refused() -> None:
    def odd(x: dict[str, int]): ...

    with pytest.raises(JobError, match="'x'"):
        flags.job_options(Path("job.py"), odd)


def test_config_file(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("[run]\nbatch_size = 7\n[job]\ncount = 2\n[versions]\nmpi = 1\n")
    options = [*flags.run_options(), *flags.job_options(Path("job.py"), many)]
    assert flags.read_config_file(file, options) == {"batch_size": 7, "count": 2}
    for text, parts in (
        ("[run]\nbatch_size = 7.5\n", "batch_size is 7.5.*integer"),
        ("[job]\nkind = 3\n", "kind is 3.*two"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=rf"c\.toml: {parts}"):
            flags.read_config_file(file, options)
    file.write_text("[run]\nbatch_sise = 7\n")
    with pytest.raises(ConfigError, match="batch_size"):
        flags.read_config_file(file, options)
    for text in ("batch_size = 7\n", "[runs]\nbatch_size = 7\n", "run = 3\n"):
        file.write_text(text)
        with pytest.raises(ConfigError, match=r"c\.toml.*\[run\].*\[job\]"):
            flags.read_config_file(file, options)
    file.write_text("[run\n")
    with pytest.raises(ConfigError, match=r"c\.toml"):
        flags.read_config_file(file, options)


@pytest.mark.parametrize("name", ["batch_size", "accumulate_steps", "threads"])
def test_options_out_of_range_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="--" + name.replace("_", "-")):
        RunConfig.of(**{name: 0})


def test_every_command_is_found_by_its_name() -> None:
    for name in _COMMANDS:
        command = _Commands("mpitrain").get_command(click.Context(click.Command("mpitrain")), name)
        assert command is not None and command.name == name
    assert _Commands("mpitrain").get_command(click.Context(click.Command("mpitrain")), "none") is None


@pytest.mark.parametrize("on", [False, True])
def test_every_recorded_option_can_be_written_as_a_flag(on: bool) -> None:
    """``--config`` passes the values of a run's ``config.toml`` on to the ranks as flags."""
    values = {name: on if isinstance(value, bool) else value for name, value in RunConfig().as_toml().items()}
    with click.Command("run", params=flags.run_options()).make_context("run", flags.flag_words(values)) as context:
        assert {name: context.params[name] for name in values} == values
