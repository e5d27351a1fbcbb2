"""Horovod's environment variables."""

from __future__ import annotations

import pytest

from mpitrain.errors import ConfigError
from mpitrain.horovod.settings import Settings, from_environment


def test_the_defaults() -> None:
    assert from_environment({}) == Settings() == from_environment({"HOROVOD_FUSION_THRESHOLD": "", "OTHER": "x"})


@pytest.mark.parametrize(
    ("name", "text", "attribute", "value"),
    [
        ("HOROVOD_FUSION_THRESHOLD", "1024", "fusion_bytes", 1024),
        ("HOROVOD_CYCLE_TIME", "2.5", "cycle_s", 0.0025),
        ("HOROVOD_STALL_CHECK_TIME_SECONDS", "7", "stall_s", 7.0),
        ("HOROVOD_STALL_CHECK_DISABLE", "1", "stall_s", None),
        ("HOROVOD_STALL_CHECK_DISABLE", "0", "stall_s", 60.0),
        ("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "9", "shutdown_s", 9.0),
        ("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "0", "shutdown_s", None),
        ("HOROVOD_TIMELINE", "a.json", "timeline", "a.json"),
        ("HOROVOD_TIMELINE", "DYNAMIC", "timeline", ""),
        ("HOROVOD_TIMELINE_MARK_CYCLES", "1", "mark_cycles", True),
    ],
)
def test_a_variable(name: str, text: str, attribute: str, value: object) -> None:
    settings = from_environment({name: text})
    assert getattr(settings, attribute) == value and settings.without_effect == ()


@pytest.mark.parametrize("text", ["x", "-1", "inf", "nan"])
def test_values_that_are_no_numbers_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=f"HOROVOD_CYCLE_TIME={text}"):
        from_environment({"HOROVOD_CYCLE_TIME": text})


def test_variables_without_an_effect_are_listed() -> None:
    given = {
        "HOROVOD_CACHE_CAPACITY": "1",
        "HOROVOD_AUTOTUNE": "1",
        "HOROVOD_CONTROLLER": "mpi",
        "HOROVOD_ELASTIC": "0",
    }
    assert from_environment(given).without_effect == ("HOROVOD_AUTOTUNE", "HOROVOD_CACHE_CAPACITY")
