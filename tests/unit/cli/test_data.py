"""The advice of ``mpitrain data``."""

from __future__ import annotations

import dataclasses

import pytest

from mpitrain.cli.data import describe_speed
from mpitrain.training.data_survey import Speed, SplitFacts


@pytest.mark.parametrize(
    ("cores", "threads", "data_workers", "words"),
    [(1, 1, 1, "one core"), (4, 4, 2, "--threads 2"), (4, 1, 2, "--data-workers 2"), (4, 4, 0, "would not")],
)
def test_the_last_line_is_about_the_cores(cores: int, threads: int, data_workers: int, words: str) -> None:
    values = {field.name: None for field in dataclasses.fields(SplitFacts)}
    speed = Speed(cores, threads, 32, 1 << 20, 1000.0, 5000.0, data_workers)
    lines = describe_speed(speed, [SplitFacts(**values)], ranks=2, workers=0, prefetch=2)  # type: ignore[arg-type]
    assert words in lines[-1]
