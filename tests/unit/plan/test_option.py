"""Options that fields define: limits, help, flags, and the modes in which they are valid."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

import click
import pytest

from mpitrain.batch_systems.resources import Resources
from mpitrain.errors import ConfigError
from mpitrain.launcher.batch.request import SubmitOptions
from mpitrain.plan.config import FIELDS, GROUPS, RunConfig
from mpitrain.plan.launch_options import LaunchOptions
from mpitrain.plan.modes import MODES, find_mode
from mpitrain.plan.option import OptionGroup, OptionInfo, info_of, option
from mpitrain.plan.options import options_of, run_options
from mpitrain.plan.parallel import ParallelConfig


@dataclass(frozen=True)
class Options(OptionGroup):
    count: int = option(3, "How many.", "N", minimum=1, also="-c")
    rate: float | None = option(None, "Use a rate.", above=0, below=1, default_text="the best")
    names: tuple[str, ...] = option((), "Names.", is_repeated=True)
    order: Literal["up", "down"] | None = option(None, "Order.")
    color: str = option("red", "Color.", choices=("red", "blue"))
    quiet: bool = option(False, "Print nothing.", has_negative=False)
    fast: bool = option(True, "Be fast.")


@pytest.mark.parametrize(
    ("limits", "accepted", "refused"),
    [
        ({}, [-1, float("nan")], []),
        ({"minimum": 0}, [0, 1e9], [-1, -0.5, float("nan")]),
        ({"above": 0, "maximum": 1}, [0.1, 1], [0, 1.01, float("nan")]),
        ({"above": 0, "below": 1}, [0.5], [0, 1]),
    ],
    ids=str,
)
def test_limits(limits: dict[str, float], accepted: list[float], refused: list[float]) -> None:
    info = OptionInfo("", **limits)
    assert [info.accepts(number) for number in accepted + refused] == [True] * len(accepted) + [False] * len(refused)


@pytest.mark.parametrize(
    ("values", "expected"), [({"count": 0}, "--count is 0: .*>= 1"), ({"rate": 1}, "--rate is 1: .*> 0 and < 1")]
)
def test_a_number_outside_of_its_limits_is_refused(values: dict[str, float], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        Options(**values)  # type: ignore[arg-type]
    assert Options().rate is None


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"order": "dwon"}, "--order is 'dwon': .*up, down.*'down'"),
        ({"color": "green"}, "--color is 'green': .*red, blue"),
    ],
)
def test_a_word_that_is_none_of_the_choices_is_refused(values: dict[str, str], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        Options(**values)  # type: ignore[arg-type]
    assert Options(order="up", color="blue").order == "up"
    with pytest.raises(ConfigError, match="--nan is 'bogus'"):
        RunConfig.of(nan="bogus")


def test_flags_and_help_follow_from_the_fields() -> None:
    flags = {str(flag.name): flag for flag in options_of(Options)}
    assert flags["count"].opts == ["--count", "-c"]
    assert flags["rate"].help == "Use a rate.  [> 0 and < 1]  [default: the best]"
    assert flags["names"].multiple
    assert (flags["quiet"].secondary_opts, flags["fast"].secondary_opts) == ([], ["--no-fast"])
    command = click.Command("test", params=list(flags.values()), callback=lambda **values: values)
    given = command.main(["-c", "5", "--names", "a", "--names", "b", "--quiet"], standalone_mode=False)
    assert given == {
        "count": 5,
        "rate": None,
        "names": ("a", "b"),
        "order": None,
        "color": "red",
        "quiet": True,
        "fast": True,
    }


@pytest.mark.parametrize("group", [*GROUPS, LaunchOptions, Resources, SubmitOptions])
def test_every_option_has_help_and_its_default_is_valid(group: type[OptionGroup]) -> None:
    assert all(info_of(field).help for field in fields(group))
    group()


def test_each_option_of_a_mode_is_refused_in_the_others() -> None:
    text = {str(flag.name): flag.help or "" for flag in run_options()}
    for name, field in FIELDS.items():
        modes = info_of(field).mode_names
        where = [*modes, *(["--join"] if info_of(field).with_join else [])]
        assert text[name].startswith(f"{', '.join(where)}: ") == bool(where)
        for mode in MODES:
            valid = {"local_steps": 2, "elastic_rho": 0.5, "gpu_transport": "nccl"}
            valid |= {"outer_optimizer": "sgd", "outer_momentum": 0.5}
            value = valid.get(name, field.default if field.default not in (None, 0, False) else 1)
            if modes and mode not in modes and value != field.default:
                with pytest.raises(ConfigError, match=f"--mode {', '.join(modes)}"):
                    RunConfig.of(mode=mode, **{name: value})


def test_defaults_in_help_are_those_in_use() -> None:
    text = {str(flag.name): flag.help or "" for flag in run_options()}
    if_none = {name: info_of(field).if_none for name, field in FIELDS.items() if info_of(field).if_none is not None}
    assert if_none and all(re.search(rf"\[default: {value}[],]", text[name]) for name, value in if_none.items())
    assert text["local_steps"].endswith(f"--join {ParallelConfig().steps_per_exchange}]")
    default, given = ParallelConfig(), ParallelConfig(staleness=0, local_steps=1, backup_workers=0)
    assert default.max_staleness == if_none["staleness"] and default.steps_per_average == if_none["local_steps"]
    assert (default.spare_workers(9), default.spare_workers(1)) == (if_none["backup_workers"], 0)
    assert (given.max_staleness, given.steps_per_average, given.spare_workers(9)) == (0, 1, 0)


@pytest.mark.parametrize("name", FIELDS)
def test_required_and_excluded_options_exist(name: str) -> None:
    info = info_of(FIELDS[name])
    assert {info.requires, info.excludes} <= {"", *FIELDS}
    if info.excludes:
        assert info_of(FIELDS[info.excludes]).excludes == name


def test_modes_that_use_servers() -> None:
    assert [name for name, mode in MODES.items() if mode.uses_servers] == ["async", "ssp", "backup"]
    for name in MODES:
        assert RunConfig.of(mode=name).uses_servers == MODES[name].uses_servers
    own = find_mode("package.module:Strategy")
    assert all(
        info_of(field).is_valid_in(own) == info_of(field).is_valid_in(MODES["sync"]) for field in FIELDS.values()
    )
    assert not own.uses_servers
    with pytest.raises(ConfigError, match="--precision float16"):
        RunConfig.of(mode="package.module:Strategy", precision="float16")


@pytest.mark.parametrize("group", [LaunchOptions, SubmitOptions])
def test_the_folder_of_copies_is_absolute(group: type[LaunchOptions | SubmitOptions]) -> None:
    assert group(stage_env=Path("/tmp")).stage_env == Path("/tmp")
    for relative in ("", "disk"):
        with pytest.raises(ConfigError, match="--stage-env"):
            group(stage_env=Path(relative))
