"""A program's output reaches the terminal in whole lines, and the log unchanged."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from mpitrain.program.output import RankOutput, error_in


def copied(
    prefix: str, folder: Path, parts: list[bytes | float], capfd: pytest.CaptureFixture[str], on_terminal: bool = False
) -> tuple[str, str]:
    """Return the output and the log of a program that writes these parts; a number is a pause in seconds."""
    output = RankOutput(prefix, folder / "logs" / "rank.log", on_terminal)
    write_end = os.dup(output._pipes[0][1])
    output.start("heading")
    for part in parts:
        if isinstance(part, bytes):
            os.write(write_end, part)
        else:
            time.sleep(part)
    os.close(write_end)
    output.wait()
    return capfd.readouterr().out, (folder / "logs" / "rank.log").read_bytes().decode()


def test_the_first_rank_prints_lines_as_they_are(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    printed, log = copied("", tmp_path, [b"one", b"\n", b"10%\r", 0.2, b"20%\r", b"\nlast"], capfd)
    assert printed == "one\n10%\r20%\r\nlast" and log == "heading\n" + printed


@pytest.mark.parametrize("on_terminal", [False, True])
def test_other_ranks_prefix_their_lines(on_terminal: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    parts = [b"o", 0.2, b"ne\n\n10%\r", 0.2, b"20%\r\nla", b"st"]
    printed, log = copied("rank 1: ", tmp_path, parts, capfd, on_terminal)
    bar = "20%" if on_terminal else "10%\r20%\r"
    assert printed == f"rank 1: one\nrank 1: \nrank 1: {bar}\nrank 1: last"
    assert log == "heading\none\n\n10%\r20%\r\nlast"


@pytest.mark.parametrize(
    ("traceback", "error"),
    [
        ("Traceback (most recent call last):\n  File 'a'\nValueError: no file", "ValueError: no file"),
        ("Traceback (most recent call last):\n  File 'a'\nKeyboardInterrupt", "KeyboardInterrupt"),
        ("Traceback (most recent call last):\n  File 'a'\na.b.Error: x\nmore text", "a.b.Error: x"),
        ("", ""),
    ],
)
def test_the_exception_of_a_traceback(traceback: str, error: str) -> None:
    assert error_in(traceback) == error


def test_a_traceback_may_follow_the_unfinished_line_of_a_progress_bar(tmp_path: Path) -> None:
    output = RankOutput("", tmp_path / "log")
    write_end = os.dup(output._pipes[1][1])
    output.start("heading")
    os.write(
        write_end, b"first\n\r 10%|#  |\r 20%|## |Traceback (most recent call last):\n  File 'a'\nValueError: no file\n"
    )
    os.close(write_end)
    output.wait()
    assert output.traceback == "Traceback (most recent call last):\n  File 'a'\nValueError: no file"


def test_the_end_of_a_long_progress_bar_is_searched_quickly(tmp_path: Path) -> None:
    output = RankOutput("", tmp_path / "log")
    output._kept = b"\r|" * 32_768
    began = time.monotonic()
    assert output.traceback == ""
    assert time.monotonic() - began < 5


def test_output_is_awaited_until_it_is_silent_or_no_longer_wanted(tmp_path: Path) -> None:
    output = RankOutput("", tmp_path / "log")
    write_end = os.dup(output._pipes[1][1])
    output.start("heading")
    output.wait(3600, lambda: True)
    output.wait(0.1)
    assert output.is_open
    os.close(write_end)
    output.wait(3600)
    assert not output.is_open
