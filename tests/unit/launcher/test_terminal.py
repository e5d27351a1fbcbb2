"""Output on a terminal: lines are wrapped between words, and never follow a progress bar on its line."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import struct
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpitrain.cli.main import main
from mpitrain.launcher import terminal
from mpitrain.monitor.console import describe
from mpitrain.monitor.format import metric, wrap

from ...support.run_directories import make_run

COLUMNS = 60


@contextlib.contextmanager
def on_terminal() -> Iterator[list[str]]:
    """Make standard output and standard error a terminal in the block; add what was printed to the list at its end."""
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
    printed: list[str] = []
    with open(child, "w") as stream, pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", str(COLUMNS))
        patch.setattr(sys, "stdout", stream)
        patch.setattr(sys, "stderr", stream)
        yield printed
    output = b""
    with contextlib.suppress(OSError):  # EIO: everything has been read, because the other end is closed
        while part := os.read(parent, 1 << 16):
            output += part
    os.close(parent)
    printed.append(output.decode().replace("\r\n", "\n"))


@pytest.mark.parametrize("output", [b"a line\n", b" 50% ---- 447,623 ex/s", b" 50% ----\r\x1b[2K"])
def test_a_message_has_lines_of_its_own(output: bytes) -> None:
    message = "rank 1 of 2 on a-host-with-a-name, was killed by signal 9, in step 3 (see --run-dir)"
    with on_terminal() as printed:
        terminal.forward(sys.stderr.buffer, output, 0)
        terminal.say(message)
    before, _, after = printed[0].replace("\x1b[?25h", "").partition("mpitrain:")
    assert not before or before.endswith(("\n", "\x1b[2K"))
    assert all(len(line) <= COLUMNS for line in after.splitlines())
    assert after.split() == message.split()


def test_errors_are_wrapped_between_words(tmp_path: Path) -> None:
    with on_terminal() as printed:
        assert main(["verify", str(tmp_path / "a-directory" / "that-does-not-exist" / ("x" * COLUMNS))]) == 2
    lines = printed[0].splitlines()
    assert all(len(line) <= COLUMNS or " " not in line for line in lines)
    assert len(lines) > 1


def test_a_table_of_runs_fits(tmp_path: Path) -> None:
    for name in ("first", "second"):
        make_run(tmp_path / name, traced=False)
    with on_terminal() as printed:
        assert main(["runs", str(tmp_path)]) == 0
    table, _, hidden = printed[0].partition("\n\n")
    titles = table.splitlines()[0]
    assert all(len(line) <= COLUMNS for line in table.splitlines())
    assert "run" in titles and "best validation" in titles
    assert [name for name in ("job", "ranks", "mode", "age") if name in hidden] and "job" not in titles


def test_wrapping_keeps_words_and_lines() -> None:
    text = "a --run-dir b\n" + "x" * 20
    assert wrap(text, 8) == "a\n--run-dir\nb\n" + "x" * 20
    assert wrap(text, 0) == text
    assert wrap("a\n  b c d e", 6) == "a\n  b c\n  d e"


@pytest.mark.parametrize("value", [3.6e-7, 9.99e-4, -2e-5])
def test_small_losses_keep_their_digits(value: float) -> None:
    assert float(metric(value)) == pytest.approx(value, rel=1e-2)
    assert float(describe("loss", value).split()[-1]) == pytest.approx(value, rel=1e-2)


@pytest.mark.parametrize(("value", "text"), [(0.0, "0.0000"), (0.25, "0.2500"), (2.30259, "2.3026")])
def test_other_losses_have_four_decimals(value: float, text: str) -> None:
    assert metric(value) == text
