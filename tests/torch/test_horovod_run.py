"""Programs with Horovod's API under ``mpitrain run`` and ``mpitrain horovodrun``: restarts, flags, timelines."""

from __future__ import annotations

import json
from pathlib import Path

import click
import numpy as np
import pytest

from mpitrain.cli.horovodrun import HorovodRunCommand
from mpitrain.process.run_directory import read_failure

from ..support.launch import PROGRAMS, Mpi, run

ELASTIC = PROGRAMS / "horovod_elastic.py"


def elastic(mpi: Mpi, output: Path, run_dir: Path, ranks: int, kill_at: int, steps: int = 6) -> dict[str, object]:
    words = ["run", "-n", ranks, "--max-restarts", 1, "--run-dir", run_dir, ELASTIC, output, steps, kill_at]
    done = run([str(mpi.python), "-m", "mpitrain", *map(str, words)], timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(output.read_text())  # type: ignore[no-any-return]


def test_a_restart_continues_with_the_committed_state(openmpi: Mpi, tmp_path: Path) -> None:
    killed = elastic(openmpi, tmp_path / "killed.json", tmp_path / "killed", 2, kill_at=3)
    whole = elastic(openmpi, tmp_path / "whole.json", tmp_path / "whole", 2, kill_at=-1)
    assert killed["first"] >= 2 and killed["resets"] == [2]  # type: ignore[operator]
    assert (whole["first"], whole["resets"]) == (0, [])
    assert killed["seen"] == whole["seen"]
    np.testing.assert_allclose(killed["weight"], whole["weight"], atol=1e-12)
    seen = [index for batch in killed["seen"] for index in batch]  # type: ignore[attr-defined]
    assert sorted(seen) == list(range(48))  # every example of the epoch once

    # The same run directory on one rank: only the steps that are left, with a reset for the number of ranks.
    assert elastic(openmpi, tmp_path / "more.json", tmp_path / "killed", 1, -1, steps=7)["first"] == 6


def test_the_rank_that_failed_first_is_named(openmpi: Mpi, tmp_path: Path) -> None:
    words = ["run", "-n", "3", "--run-dir", tmp_path / "run", PROGRAMS / "horovod_mistakes.py", "raising_rank"]
    done = run([str(openmpi.python), "-m", "mpitrain", *map(str, words)], timeout=90)
    assert done.returncode == 1
    failure = read_failure(tmp_path / "run")
    assert failure is not None and failure.rank in (1, 2) and "a mistake of the program" in failure.traceback


def test_horovodrun_writes_a_timeline(openmpi: Mpi, tmp_path: Path) -> None:
    timeline = tmp_path / "timeline.json"
    words = ["horovodrun", "-np", "2", "--timeline-filename", timeline, "--timeline-mark-cycles", openmpi.python]
    options = json.dumps({"rows": 8, "optimizer": "SGD"})
    words = [openmpi.python, "-m", "mpitrain", *words, PROGRAMS / "horovod_training.py", options]
    done = run([*map(str, words)], timeout=90, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    events = json.loads(timeline.read_text())
    names = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert {"allreduce.0.weight", "broadcast.0.weight"} <= names
    for kind in ("NEGOTIATE_ALLREDUCE", "ALLREDUCE"):
        assert len([event for event in events if event["name"] == kind and event["ph"] == "B"]) == 4 * 5
        assert len([event for event in events if event["name"] == kind and event["ph"] == "E"]) == 4 * 5
    assert any(event["name"] == "CYCLE_START" for event in events)


def translate(words: list[str]) -> list[str]:
    """Return the arguments for ``mpitrain run``."""
    return HorovodRunCommand(lambda arguments: arguments).main(words, standalone_mode=False)  # type: ignore[no-any-return]


def test_flags_of_horovodrun() -> None:
    words = ["-np", "4", "-H", "a:2,b:2", "--fusion-threshold-mb", "2", "--network-interfaces=eth1", "-p", "23"]
    translated = translate([*words, "--no-stall-check", "python", "train.py", "-np", "1"])
    assert translated[-5:] == ["--", "python", "train.py", "-np", "1"]
    assert sorted(zip(translated[:-5:2], translated[1:-5:2], strict=True)) == [
        ("--env", "HOROVOD_FUSION_THRESHOLD=2097152"),
        ("--env", "HOROVOD_STALL_CHECK_DISABLE=1"),
        ("--hosts", "a:2,b:2"),
        ("--network", "eth1"),
        ("--ranks", "4"),
        ("--remote-agent", "ssh -p 23"),
    ]


def test_zeros_are_passed_on() -> None:
    words = ["--fusion-threshold-mb", "0", "--cycle-time-ms", "0", "--stall-check-warning-time-seconds", "0", "python"]
    translated = translate(words)
    assert "HOROVOD_FUSION_THRESHOLD=0" in translated
    assert {"HOROVOD_CYCLE_TIME=0.0", "HOROVOD_STALL_CHECK_TIME_SECONDS=0.0"} <= set(translated)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--gloo", "python"], "over MPI"),
        (["--output-filename", "logs", "python"], "--run-dir"),
        (["--autotune", "python"], "no such setting"),
        (["--host-discovery-script", "x", "python"], "-H"),
        (["-np"], "-np"),
        (["-np", "4"], "COMMAND"),
        (["-np", "0", "python"], "-np"),
        (["--bogus", "python"], "--bogus"),
        (["--fusion-threshold-mb", "large", "python"], "large"),
        (["--cycle-time-ms", "-1", "python"], "--cycle-time-ms"),
    ],
)
def test_refused_flags_of_horovodrun(words: list[str], named: str) -> None:
    with pytest.raises(click.UsageError) as raised:
        translate(words)
    assert named in raised.value.format_message()
