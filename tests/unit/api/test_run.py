"""``mpitrain stop``: which processes of a run are asked to end."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from mpitrain.api.run import stop_runs
from mpitrain.errors import LaunchError
from mpitrain.process.pid import pid_start

from ...support.waiting import limit


def test_a_learner_that_starts_is_stopped(tmp_path: Path) -> None:
    """Its ranks have written nothing yet: only the process that starts them is known."""
    learner = tmp_path / "learners" / "0"
    learner.mkdir(parents=True)
    with pytest.raises(LaunchError):
        next(stop_runs(tmp_path))
    with subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        record = {"host": socket.gethostname(), "pid": process.pid, "start": pid_start(process.pid)}
        (learner / ".launcher.json").write_text(json.dumps(record))
        [(path, state)] = stop_runs(tmp_path)
        assert path == learner and "starting" in state
        assert process.wait(limit(10)) in (-signal.SIGINT, 1)  # 1: Python was still starting
