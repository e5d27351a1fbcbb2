"""A rank's log contains that rank's messages from Python's logging and warnings, and no other rank's."""

from __future__ import annotations

import logging
import re
import warnings
from pathlib import Path

import pytest

from mpitrain.monitor.console import Console
from mpitrain.monitor.rank_log import RankLog, path_for


def test_log_and_warnings_with_the_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = RankLog(None, warns=False)
    logging.getLogger("some.package").info("message %d", 7)
    assert not any(tmp_path.iterdir())
    log.open(tmp_path, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(True)
        warnings.warn("look out", stacklevel=1)
    log.close()
    log.close()
    logging.getLogger("some.package").error("too late")
    logged, warned = path_for(tmp_path, 3).read_text().splitlines()[:2]
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} INFO some\.package: message 7", logged)
    assert "WARNING py.warnings" in warned and "look out" in warned
    assert "too late" not in path_for(tmp_path, 3).read_text()
    assert "look out" not in capsys.readouterr().err


def test_another_rank_prints_only_warnings(capsys: pytest.CaptureFixture[str]) -> None:
    log = RankLog(None, warns=True)
    logging.getLogger("x").warning("beware")
    logging.getLogger("mpitrain.x").info("by the way")
    log.close()
    assert capsys.readouterr() == ("", "WARNING: beware\n")


def test_the_chief_prints_the_messages_of_the_package_and_the_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = RankLog(Console(0), warns=False)
    log.open(tmp_path, 0)
    for name in ("mpitrain.training.rank", "mpitrain_job_mnist", "mpi4py", "mpitrainer.unrelated"):
        logging.getLogger(name).info("info of %s", name)
        logging.getLogger(name).debug("debug of %s", name)
    logging.getLogger("x").warning("beware")
    log.close()
    assert capsys.readouterr() == ("info of mpitrain.training.rank\ninfo of mpitrain_job_mnist\n", "WARNING: beware\n")
    logged = path_for(tmp_path, 0).read_text()
    assert "debug of mpitrain.training.rank" in logged and "info of mpi4py" in logged
    assert "debug of mpi4py" not in logged


def test_a_resumed_run_adds_to_its_logs(tmp_path: Path) -> None:
    for line in ("first", "second"):
        log = RankLog(None, warns=False)
        log.open(tmp_path, 0)
        logging.getLogger("x").info(line)
        log.close()
    assert [line.split()[-1] for line in path_for(tmp_path, 0).read_text().splitlines()] == ["first", "second"]
