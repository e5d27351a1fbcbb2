"""A rank's log has what Python's logging and warnings say, and nobody else's."""

from __future__ import annotations

import logging
import re
import warnings
from pathlib import Path

import pytest

from mpitrain.monitor.rank_log import RankLog, path_for


def test_log_and_warnings_with_the_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = RankLog(tmp_path, 3, printed=False)
    logging.getLogger("some.package").info("told %d", 7)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(True)
        warnings.warn("look out", stacklevel=1)
    log.close()
    log.close()
    logging.getLogger("some.package").error("too late")
    told, warned = path_for(tmp_path, 3).read_text().splitlines()[:2]
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} INFO some\.package: told 7", told)
    assert "WARNING py.warnings" in warned and "look out" in warned
    assert "too late" not in path_for(tmp_path, 3).read_text()
    assert "look out" not in capsys.readouterr().err


def test_only_the_chief_prints_warnings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = RankLog(tmp_path, 0, printed=True)
    logging.getLogger("x").warning("beware")
    logging.getLogger("x").info("by the way")
    log.close()
    assert capsys.readouterr().err == "WARNING: beware\n"


def test_a_resumed_run_adds_to_its_logs(tmp_path: Path) -> None:
    for line in ("first", "second"):
        log = RankLog(tmp_path, 0, printed=False)
        logging.getLogger("x").info(line)
        log.close()
    assert [line.split()[-1] for line in path_for(tmp_path, 0).read_text().splitlines()] == ["first", "second"]
