"""Faults: the messages of a run, the files that remain, and the files that must not change."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from mpitrain.process import rank_status
from mpitrain.process.host_watcher import temporary_files

from ..support.kills import ranks_of
from ..support.launch import JOBS, Mpi, one_line, run
from ..support.waiting import limit, wait_until

JOB = JOBS / "hanging.py"


def start(mpi: Mpi, folder: Path, steps: int, *flags: str) -> subprocess.Popen[str]:
    words = ["-m", "mpitrain", "run", "-n", "2", *flags, str(JOB), "--kind", "none", "--steps", str(steps)]
    words += ["--run-dir", str(folder), "--save-steps", "20"]
    return subprocess.Popen([str(mpi.python), *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for_step(process: subprocess.Popen[str], folder: Path, step: int = 200) -> list[rank_status.RankStatus]:
    """Return the status of the ranks once all are past ``step`` and have recorded their temporary files."""

    def ready() -> list[rank_status.RankStatus]:
        statuses = rank_status.read(folder)
        return statuses if len(statuses) == 2 and all(status.step > step for status in statuses) else []

    return wait_until(ready, lambda: rank_status.read(folder), process=process)


def wait_until_forgotten(folder: Path, pid: int) -> None:
    """Wait until a process is not recorded as a rank any more."""
    wait_until(lambda: pid not in [status.pid for status in rank_status.read(folder)], f"{pid} is still recorded")


def child_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def _mapped_by(pid: int) -> str:
    return Path(f"/proc/{pid}/maps").read_text()


def wait_until_gone(folder: Path, paths: list[str]) -> None:
    def left() -> list[str | int]:
        return [*filter(os.path.exists, paths), *ranks_of(folder)]

    wait_until(lambda: not left(), left, 20)


@pytest.mark.parametrize(
    ("mpi", "victim"),
    [("openmpi", victim) for victim in ("rank", "reaper", "launcher", "supervisor")] + [("mpich", "launcher")],
    indirect=["mpi"],
)
def test_nothing_is_left_after_a_kill(mpi: Mpi, victim: str, tmp_path: Path) -> None:
    began = time.time()
    with start(mpi, tmp_path, 1_000_000) as process:
        try:
            rank = wait_for_step(process, tmp_path)[1]
            # Only files of this run, because other tests run at the same time.
            paths = [path for path in temporary_files(began) if path in _mapped_by(rank.pid)]
            assert paths
            pids = {"rank": rank.pid, "reaper": rank.reaper, "supervisor": process.pid}
            os.kill(pids.get(victim) or child_of(process.pid), signal.SIGKILL)
            output, _ = process.communicate(timeout=limit(60))
        finally:
            process.kill()
    if victim == "supervisor":
        with start(mpi, tmp_path, 1) as again:
            assert again.wait(timeout=limit(60)) == 0
    else:
        assert process.returncode == 1
        assert output.count("was killed by signal 9") == 1
    wait_until_gone(tmp_path, paths)
    assert not (tmp_path / ".ranks").exists()
    assert not list(tmp_path.glob("checkpoints/*.partial"))


def test_a_run_continues_after_kills(openmpi: Mpi, tmp_path: Path) -> None:
    with start(openmpi, tmp_path, 1_000_000, "--max-restarts", "2") as process:
        try:
            for victim in range(2):
                rank = wait_for_step(process, tmp_path, 200 + 200 * victim)[victim]
                os.kill(rank.pid, signal.SIGKILL)
                wait_until_forgotten(tmp_path, rank.pid)
            wait_for_step(process, tmp_path, 600)
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=limit(30)) == os.EX_TEMPFAIL
        finally:
            process.kill()
    assert not (tmp_path / ".ranks").exists()


def hangs(folder: Path) -> bool:
    """Return whether both ranks have reached the step in which rank 1 hangs, and make no progress."""
    steps = [status.step for status in rank_status.read(folder)]
    return len(steps) == 2 and min(steps) >= 19 and len(rank_status.read_activities(folder)) == 2


@pytest.mark.parametrize(("kind", "status"), [("sleep", 128 + signal.SIGINT), ("stop", 75)])
def test_one_interrupt_ends_a_run_that_hangs(openmpi: Mpi, kind: str, status: int, tmp_path: Path) -> None:
    """A stopped rank continues, and saves."""
    words = ["-m", "mpitrain", "run", "-n", "2", str(JOB), "--kind", kind, "--run-dir", str(tmp_path)]
    with subprocess.Popen([str(openmpi.python), *words], stderr=subprocess.PIPE, text=True) as process:
        try:
            wait_until(lambda: hangs(tmp_path), "both ranks make no progress", process=process)
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=limit(30))
        finally:
            process.kill()
    assert process.returncode == status
    assert "rank 1" in err and "rank 0: waiting for rank 1" in err
    assert not ranks_of(tmp_path)


def test_a_rank_that_exits_with_status_0_is_named(mpi: Mpi, tmp_path: Path) -> None:
    words = ["-m", "mpitrain", "run", "-n", "3", str(JOB), "--kind", "exit", "--rank", "2", "--run-dir", str(tmp_path)]
    done = run([str(mpi.python), *words])
    assert done.returncode == 1
    assert "rank 2 of 3" in one_line(done.stderr)


def test_ranks_of_one_host_open_no_port(openmpi: Mpi, tmp_path: Path) -> None:
    with start(openmpi, tmp_path, 1_000_000) as process:
        try:
            pids = [status.pid for status in wait_for_step(process, tmp_path)]
            sockets = {
                os.readlink(path) for pid in pids for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink()
            }
            listening = {
                f"socket:[{words[9]}]"
                for table in ("tcp", "tcp6")
                for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
                if (words := line.split())[3] == "0A"
            }
            assert sockets
            assert not sockets & listening
        finally:
            process.kill()
            process.wait()
    wait_until_gone(tmp_path, [])


@pytest.mark.parametrize("name", ["metrics.jsonl", ".ranks"])
def test_a_link_out_of_the_run_directory_is_refused(openmpi: Mpi, name: str, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    for kept in ("5", "file"):
        (outside / kept).write_text("kept")
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / name).symlink_to(outside if name in (".ranks", "logs") else outside / "file")
    words = [str(JOBS / "small.py"), "--train-steps", "2", "--run-dir", str(folder)]
    for command in (["run", "-n", "1"], ["train"]):
        done = run([str(openmpi.python), "-m", "mpitrain", *command, *words])
        assert done.returncode == 2
        assert name in one_line(done.stderr)
    assert {path.name: path.read_text() for path in outside.iterdir()} == {"5": "kept", "file": "kept"}


def test_a_fifo_as_a_record_is_refused(openmpi: Mpi, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "metrics.jsonl")
    done = run([str(openmpi.python), "-m", "mpitrain", "train", str(JOBS / "small.py"), "--run-dir", str(tmp_path)])
    assert done.returncode == 2
    assert "metrics.jsonl" in one_line(done.stderr)


def test_training_survives_a_full_disk(openmpi: Mpi, tmp_path: Path) -> None:
    """The disk becomes full after the first records, and has space again later."""
    folder, words = tmp_path / "disk", ["--kind", "none", "--steps", "1500", "--log-steps", "5", "--run-dir"]
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(folder)], check=True)
    try:
        filler = folder / "filler"
        command = [str(openmpi.python), "-m", "mpitrain", "train", str(JOB), *words, str(folder / "run")]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
            metrics = folder / "run" / "metrics.jsonl"
            wait_until(lambda: metrics.exists() and metrics.stat().st_size, "metrics", process=process)
            with contextlib.suppress(OSError), filler.open("wb") as file:
                file.write(bytes(1 << 20))
            size = metrics.stat().st_size
            time.sleep(2)  # of steps whose records are lost
            filler.unlink()
            _, err = process.communicate(timeout=limit(60))
        assert process.returncode == 0, err
        lines = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
        assert lines == sorted(lines) and lines[-1] == 1500
        assert len(lines) < 300 and metrics.stat().st_size > size
        assert "Traceback" not in err
    finally:
        subprocess.run(["umount", str(folder)], check=True)
