"""How ``mpitrain run`` detects signals, and run directories that are in use."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mpitrain.errors import LaunchError
from mpitrain.launcher import supervisor as run
from mpitrain.launcher.interrupts import Interrupts
from mpitrain.plan.request import JobRequest
from mpitrain.process import rank_status

from ...support.launch import JOBS


def test_one_signal_sent_twice_at_once_is_one() -> None:
    interrupts = Interrupts()
    with interrupts.recorded():
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGUSR1):
            os.kill(os.getpid(), number)
        assert interrupts.received == [signal.SIGTERM]
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupts.received == [signal.SIGTERM, signal.SIGINT]


def test_what_nohup_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        interrupts = Interrupts()
        with interrupts.recorded():
            os.kill(os.getpid(), signal.SIGHUP)
        assert interrupts.received == []
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_run_directory_in_use_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_OTHER_RUN_S", 0.3)
    request = JobRequest(Path("job.py"), {"run_dir": tmp_path})
    code = "import sys, time; from pathlib import Path; from mpitrain.process.rank_status import RankStatusFile\n"
    code += "RankStatusFile(Path(sys.argv[1]), 3); print(flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(LaunchError, match=rf"rank 3 .*{other.pid}.*--run-dir"), run._run_dir(request):
            raise AssertionError
        assert len(rank_status.read(tmp_path)) == 1, "its entry is as it was"
        other.kill()
        other.wait()
    with run._run_dir(request) as folder:
        assert folder == tmp_path


@pytest.mark.parametrize("after_s", [0.05, 0.2, 0.5])
def test_ctrl_c_while_modules_are_imported_ends_it(after_s: float) -> None:
    words = [
        sys.executable,
        "-X",
        "importtime",
        "-m",
        "mpitrain",
        "run",
        "-n",
        "2",
        str(JOBS / "small.py"),
        "--dry-run",
    ]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        while (line := process.stderr.readline()) and not line.endswith("| mpitrain\n"):
            pass  # the interpreter starts
        time.sleep(after_s)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert process.returncode == -signal.SIGINT or "mpirun" in out, "or it had come to its end"
    assert "Traceback" not in err
