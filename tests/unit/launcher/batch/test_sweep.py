"""Sweeps: the combinations of option values and the indexes of their array jobs."""

from __future__ import annotations

import click
import pytest

from mpitrain.batch_systems.job import Point
from mpitrain.errors import ConfigError
from mpitrain.launcher.batch.sweep import combinations
from mpitrain.plan.options import CommaSeparated

from ....support.batches import batch

OPTIONS = [
    click.Option(["--learning-rate"], type=float),
    click.Option(["--hidden-units"], type=int),
    click.Option(["--normalize/--no-normalize"]),
    click.Option(["--layers"], type=CommaSeparated(click.INT)),
    click.Option(["--name"]),
]


def test_all_combinations() -> None:
    points = combinations(["learning_rate=0.1,0.01", "--hidden-units=100,1000"], OPTIONS)
    assert [point.name for point in points][:2] == [
        "learning_rate=0.1,hidden_units=100",
        "learning_rate=0.1,hidden_units=1000",
    ]
    assert points[3].words == ("--learning-rate=0.01", "--hidden-units=1000")
    assert [p.words[0] for p in combinations(["normalize=true,false"], OPTIONS)] == ["--normalize", "--no-normalize"]
    assert [p.words[0] for p in combinations(["layers=1,2;3"], OPTIONS)] == ["--layers=1,2", "--layers=3"]


def test_names_of_runs_can_be_folders() -> None:
    names = [point.name for point in combinations(["name=a/b,a b,$(x)," + 300 * "y"], OPTIONS)]
    assert len(set(names)) == 4
    assert not any(character in name for name in names for character in "/ $()")
    assert all(len(name) < 256 for name in names)


@pytest.mark.parametrize(
    ("sweep", "expected"),
    [
        (["lerning_rate=1"], "did you mean learning_rate"),
        (["learning_rate=x"], "not a valid float"),
        (["learning_rate"], "--sweep learning_rate: "),
        (["learning_rate=1,,2"], "--sweep learning_rate=1,,2"),
        (["learning_rate=1,1"], "--sweep learning_rate=1,1"),
        (["learning_rate=1", "learning_rate=2"], "--sweep learning_rate "),
    ],
)
def test_invalid_sweeps_are_refused(sweep: list[str], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        combinations(sweep, OPTIONS)


def test_indexes_of_a_sweep() -> None:
    points = [Point(name, ()) for name in "abcd"]
    assert batch(points=points).array == "0-3"
    assert batch(points=points, array="%2").array == "0-3%2"
    assert batch(points=points, array="0-2%2").array == "0-2%2"
    with pytest.raises(ConfigError, match=r"--array 2-4: .*4 .*0-3"):
        _ = batch(points=points, array="2-4").array
