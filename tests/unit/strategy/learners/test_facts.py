"""What a learner must have in common with the run that it joins: another is refused, and the difference is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpitrain.core.layout import Layout
from mpitrain.errors import ConfigError
from mpitrain.strategy.learners.facts import check_facts
from mpitrain.strategy.learners.store import Folder

LAYOUT = Layout.pack([("a", (8, 4), "param"), ("b", (20,), "param"), ("mean", (3,), "state")])


def check(folder: Path, own: dict[str, object], of_run: dict[str, object], layout: Layout = LAYOUT) -> None:
    check_facts(own, of_run, layout, Folder(folder))


def test_another_model_is_refused(tmp_path: Path) -> None:
    one = {"model": "one", "seed": [0, 1]}
    check(tmp_path, one, one)
    with pytest.raises(ConfigError, match="differ in model"):
        check(tmp_path, {**one, "model": "two"}, one)
    check(tmp_path, one, one)


def test_a_model_that_differs_in_a_tensor(tmp_path: Path) -> None:
    check(tmp_path, {"model": "one"}, {"model": "one"})
    other = Layout.pack([("a", (8, 4), "param"), ("b", (21,), "param"), ("mean", (3,), "state")])
    with pytest.raises(ConfigError) as caught:
        check(tmp_path, {"model": "two"}, {"model": "one"}, other)
    assert "b 21" in str(caught.value) and "b 20" in str(caught.value) and "8x4" not in str(caught.value)


def test_what_the_first_learner_could_not_compare_is_not_compared(tmp_path: Path) -> None:
    check(tmp_path, {"code of another Python": "2"}, {"code of one Python": "1"})


def test_an_error_names_the_arguments_that_differ(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        check(tmp_path, {"optimizer": "sgd(rate=1, l2=0)"}, {"optimizer": "sgd(rate=2, l2=0)"})
    assert "rate=1" in str(caught.value) and "rate=2" in str(caught.value) and "l2" not in str(caught.value)
