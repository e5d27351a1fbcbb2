"""``mpitrain watch`` shows the content of the files in the terminal's size, and ends with the run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from mpitrain.cli.main import main
from mpitrain.monitor.heartbeat import BEAT_S, QUIET_S, SKEW_S, BatchJob, ProcessHost, Status, write, write_submitted
from mpitrain.process.run_directory import Failure, record_failure
from mpitrain.report import watch
from mpitrain.report.watch import curve

from ...support.run_directories import Clock, make_run

ELSEWHERE = Status("running", 500, 1000, "2 workers", 1, ProcessHost("far", "b", "p"), 1, "1", 0.0)


def picture(view: watch.View, width: int, height: int) -> list[str]:
    console = Console(width=width, height=height, force_terminal=False)
    with console.capture() as capture:
        console.print(view.render(width, height))
    return capture.get().splitlines()


@pytest.mark.parametrize(("width", "height"), [(80, 24), (80, 50), (200, 60), (40, 12), (20, 5)])
def test_the_picture_fits_the_terminal(tmp_path: Path, width: int, height: int) -> None:
    view = watch.View(make_run(tmp_path / "run", mode="async"))
    write(tmp_path / "run", ELSEWHERE)
    view.look()
    lines = picture(view, width, height)
    assert len(lines) < height
    assert max(map(len, lines)) <= width
    assert any("\u2801" <= letter <= "\u28ff" for line in lines for letter in line) == (height > 8)


def test_it_reports_where_the_run_is(tmp_path: Path) -> None:
    view = watch.View(make_run(tmp_path / "run", steps=1000))
    write(tmp_path / "run", ELSEWHERE)
    view.look()
    text = "\n".join(picture(view, 100, 40))
    for part in ("mnist_mlp, sync, 2 workers on far: running", "step 1,000 of 1,000, 100 %", "accuracy 0.94"):
        assert part in text


def test_a_recorded_failure_ends_the_view_of_a_run_elsewhere(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    write(folder, ELSEWHERE)
    view = watch.View(folder)
    view.look()
    assert view.state == "running"
    record_failure(folder, Failure("rank 1 has died", 1))  # after the last heartbeat
    view.look()
    assert view.state == "died"


def test_what_comes_later_is_shown(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=100)
    view = watch.View(folder)
    view.look()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 700, "time_s": 1.0, "loss": 77.0}) + "\n")
    view.look()
    assert "step 700" in "\n".join(picture(view, 100, 40))
    assert "loss 77" in "\n".join(picture(view, 100, 40))


def test_a_submitted_run_is_shown_before_and_after_it_starts(tmp_path: Path) -> None:
    write_submitted(tmp_path / "run", "8 ranks", BatchJob("slurm", "4711", "night"))
    view = watch.View(tmp_path / "run")
    view.look()
    text = "\n".join(picture(view, 100, 40))
    assert all(part in text for part in ("night", "8 ranks", "submitted", "4711"))
    assert not view.ended
    (make_run(tmp_path / "started") / "config.toml").rename(tmp_path / "run" / "config.toml")
    write(tmp_path / "run", ELSEWHERE)
    view.look()
    assert "mnist_mlp, sync, 2 workers on far: running" in "\n".join(picture(view, 100, 40))


def test_a_run_elsewhere_is_dead_when_no_beat_was_seen_for_long(tmp_path: Path) -> None:
    clock = Clock()
    folder = make_run(tmp_path / "run")
    view = watch.View(folder, clock)
    for beat in range(3):
        write(folder, replace(ELSEWHERE, heartbeat=beat))
        view.look()
        assert not view.ended
        clock.now += int(QUIET_S) - 1
    clock.now += int(BEAT_S)
    view.look()
    assert view.state == "died"
    write(folder, replace(ELSEWHERE, state="finished"))
    view.look()
    assert view.state == "finished" and view.ended
    assert SKEW_S > QUIET_S > 2 * BEAT_S


@pytest.mark.parametrize("state", ["finished", "stopped", "failed"])
def test_the_command_ends_with_the_run(tmp_path: Path, state: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(tmp_path / "run")
    write(folder, replace(ELSEWHERE, state=state))  # type: ignore[arg-type]
    assert main(["watch", str(folder)]) == 0
    assert state in capsys.readouterr().out


def test_what_is_no_run_is_reported_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"mpitrain: {tmp_path} ") and error.count("\n") == 1


def dots(lines: list[str]) -> np.ndarray:
    """Return the dots of Braille characters as an array."""
    bits = np.array([[ord(letter) - 0x2800 for letter in line] for line in lines])
    order = [[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]]
    return np.block([[np.array([[(b & bit) != 0 for bit in row] for row in order]) for b in line] for line in bits])


@pytest.mark.parametrize("n", [1, 2, 3, 20, 1000])
def test_a_rising_line_goes_from_corner_to_corner_without_gaps(n: int) -> None:
    drawn = dots(curve(np.arange(n), np.arange(n) * 2.5 - 7, 10, 4))
    assert drawn.shape == (16, 20)
    if n > 1:
        assert drawn[-1, 0] and drawn[0, -1]
        assert drawn.any(axis=0).all() and drawn.any(axis=1).all()
    else:
        assert drawn.sum() == 1


def test_what_is_not_finite_leaves_the_rest() -> None:
    drawn = dots(curve(np.arange(4), np.array([np.nan, 1.0, np.inf, 2.0]), 5, 2))
    assert drawn.any()
    assert not dots(curve(np.arange(2), np.full(2, np.nan), 5, 2)).any()
    assert not dots(curve(np.zeros(0), np.zeros(0), 5, 2)).any()


def test_a_peak_between_columns_is_not_lost() -> None:
    y = np.zeros(1000)
    y[333] = 1.0
    assert dots(curve(np.arange(1000), y, 10, 4))[0].any()
