"""The server that forks the first ranks on the host of ``mpitrain run``: what ranks have in common, and what not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import uuid
from pathlib import Path
from typing import Any

import pytest

from mpitrain.process import fork_server, rank_status

from ..support.launch import LAUNCHER_ENVIRONMENT, Mpi, run
from ..support.results import SMALL
from ..support.waiting import limit, wait_until

_JOB = f"""
import json, os, runpy, sys
from pathlib import Path
import numpy as np
from threadpoolctl import threadpool_info
from mpitrain.process.pid import parent_of

def job():
    rank = os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK"))
    seen = dict(
        starter=Path(f"/proc/{{parent_of(os.getppid())}}/comm").read_text().strip(),
        number=np.random.rand(),
        value=os.environ.get("MY_VALUE"),
        folder=os.getcwd(),
        threads=max(library["num_threads"] for library in threadpool_info()),
        is_line_buffered=sys.stdout.line_buffering,
        processors=sorted(os.sched_getaffinity(0)),
        marks=[name for name in os.environ if name.startswith("MPITRAIN_FORKS_")],
    )
    Path(__file__).with_name(f"rank-{{rank}}.json").write_text(json.dumps(seen))
    return runpy.run_path({str(SMALL)!r})["job"]()
"""


def _seen(mpi: Mpi, folder: Path, *flags: str, steps: int = 1) -> list[dict[str, Any]]:
    """Start or resume a run on two ranks; return what their jobs have seen."""
    job = folder / "job.py"
    job.write_text(_JOB)
    words = [str(mpi.python), "-m", "mpitrain", "run", "-n", "2", *flags, str(job), "--train-steps", str(steps)]
    done = run([*words, "--run-dir", str(folder / "run")], env=LAUNCHER_ENVIRONMENT, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]


def test_first_ranks_are_forked_but_have_their_own_state(mpi: Mpi, tmp_path: Path) -> None:
    _seen(mpi, tmp_path)
    ranks = _seen(mpi, tmp_path, steps=2)  # resumes, and is to use the same kernels of OpenBLAS
    name = fork_server.NAME.decode()
    assert [(rank["starter"], rank["folder"], rank["marks"]) for rank in ranks] == [(name, str(tmp_path), [])] * 2
    assert ranks[0]["number"] != ranks[1]["number"]
    for rank in ranks:
        assert rank["is_line_buffered"] and 1 <= rank["threads"] <= len(rank["processors"])
    if len(os.sched_getaffinity(0)) > 1:
        assert ranks[0]["processors"] != ranks[1]["processors"]  # one core each


_TORCH_JOB = f"""
import sys
was_imported = "torch" in sys.modules
import torch, json, os, runpy
INITIAL = torch.initial_seed()
from pathlib import Path

def job():
    seen = was_imported, INITIAL, torch.get_num_threads(), len(os.sched_getaffinity(0))
    Path(__file__).with_name(f"rank-{{os.getpid()}}.json").write_text(json.dumps(seen))
    return runpy.run_path({str(SMALL)!r})["job"]()
"""


@pytest.mark.parametrize(
    ("before", "after", "is_imported"),
    [
        ("", "import settings", True),
        ("", "LOGS = os.environ.get('TORCH_LOGS')", False),
        ("import sys, settings", "", False),
        ("from settings.defaults import LOGS as own", "", False),
        ("import numpy as np, os.path as osp\nfrom mpitrain import data", "", True),
    ],
)
def test_torch_is_imported_once_for_all_ranks(
    openmpi: Mpi, before: str, after: str, is_imported: bool, tmp_path: Path
) -> None:
    """Unless the job, or a module that it imports before, may set variables that torch reads when it is imported."""
    job = tmp_path / "job.py"
    job.write_text(before + _TORCH_JOB + after)
    for folder in ("settings", "data"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").touch()
    (tmp_path / "settings" / "defaults.py").write_text("import os; LOGS = os.environ['TORCH_LOGS'] = '+dynamo'")
    words = [str(openmpi.python), "-m", "mpitrain", "run", "-n", "2", str(job), "--train-steps", "1"]
    done = run([*words, "--run-dir", str(tmp_path / "run")], env=LAUNCHER_ENVIRONMENT, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    ranks = [json.loads(path.read_text()) for path in tmp_path.glob("rank-*.json")]
    assert [was_imported for was_imported, *_ in ranks] == [is_imported] * 2
    assert ranks[0][1] != ranks[1][1]  # the seeds
    assert all(1 <= threads <= cores for _, _, threads, cores in ranks)


@pytest.mark.parametrize("name", ["MY_VALUE", "OPENBLAS_VERBOSE"])
def test_ranks_with_other_variables_start_by_themselves(openmpi: Mpi, name: str, tmp_path: Path) -> None:
    """A module may have read a variable, or not, when it was imported."""
    ranks = _seen(openmpi, tmp_path, "--env", f"{name}=1")
    assert all(rank["starter"] != fork_server.NAME.decode() for rank in ranks)
    assert [rank["value"] for rank in ranks] == ["1" if name == "MY_VALUE" else None] * 2


def test_programs_have_no_server(openmpi: Mpi, tmp_path: Path) -> None:
    words = [str(openmpi.python), "-m", "mpitrain", "run", "-n", "1", "--run-dir", str(tmp_path / "run"), "--"]
    mark = f"MPITRAIN_TEST_MARK={uuid.uuid4()}"
    environment = {**os.environ, **LAUNCHER_ENVIRONMENT, **dict([mark.split("=")])}
    with subprocess.Popen([*words, "sleep", "1000"], env=environment, stdout=subprocess.DEVNULL) as process:
        wait_until(lambda: any(b"sleep" in words for words in _words(mark)), "the program runs", poll_s=0.2)
        assert not [words for words in _words(mark) if words[1:4] == [b"-m", b"mpitrain", b"train"]]
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=limit(60))
    assert not _started_with(mark)


@pytest.mark.parametrize("ending", ["mistyped option", "killed at the start", "killed"])
def test_no_server_is_left(openmpi: Mpi, ending: str, tmp_path: Path) -> None:
    mark = f"MPITRAIN_TEST_MARK={uuid.uuid4()}"
    environment = {**os.environ, **LAUNCHER_ENVIRONMENT, **dict([mark.split("=")])}
    words = [str(openmpi.python), "-m", "mpitrain", "run", "-n", "2", str(SMALL), "--run-dir", str(tmp_path / "run")]
    words += ["--lerning-rate", "1"] if ending == "mistyped option" else ["--train-steps", "100000000"]
    with subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        if ending == "killed at the start":
            wait_until(lambda: len(_started_with(mark)) > 1, "the server is started", poll_s=0.2)
        if ending == "killed":
            wait_until(lambda: any(rank.is_training for rank in rank_status.read(tmp_path / "run")), "the ranks train")
        if ending != "mistyped option":
            os.kill(process.pid, signal.SIGKILL)
        process.wait(timeout=limit(60))
    wait_until(lambda: not _started_with(mark), "nothing is left", poll_s=0.2)


def _words(mark: str) -> list[list[bytes]]:
    """Return the command lines of these processes."""
    return [words.split(b"\0") for words in _started_with(mark).values()]


def _started_with(mark: str) -> dict[str, bytes]:
    """Return the processes in whose environment this variable was at their start, and their command lines."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (process / "environ").read_bytes().split(b"\0"):
                found[process.name] = (process / "cmdline").read_bytes()
        except OSError:
            continue
    return found
