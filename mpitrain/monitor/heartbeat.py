"""The heartbeat of a run: ``status.json``, which the chief rewrites every few seconds.

A run that ends writes its final state. A killed run writes nothing more, and a reader has to detect this. On the same
host the reader looks for the process. On another host the reader has only the file, and the clocks of two hosts may
differ. The reader therefore computes the file's age by the clock of the file system, and in case of doubt waits for the
next heartbeat.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Literal, NamedTuple

from ..batch_systems.registry import current_job_ids
from ..core.files import replace_file
from ..process.pid import _text, is_alive, pid_start
from ..process.run_directory import FAILURE

STATUS = "status.json"
BEAT_S = 5.0
# Clients of a network file system may see a version of a file that is up to a minute old.
QUIET_S = 75.0
# Clocks without synchronization may differ by minutes, but not by more than this.
SKEW_S = 3600.0

State = Literal["submitted", "running", "finished", "finished early", "stopped", "failed", "died", "unknown"]
ENDED: tuple[State, ...] = ("finished", "finished early", "stopped", "failed", "died")
# Keys of status.json, and of its host entry, as written by version 0.1.
_OLD_KEYS = {"machine": "host", "beat": "heartbeat", "began": "started_at"}
_OLD_HOST_KEYS = {"host": "hostname", "boot": "boot_id", "pids": "pid_namespace"}
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ProcessHost:
    """The host of a process, that host's boot, and the namespace of the process id."""

    hostname: str
    boot_id: str
    pid_namespace: str

    @classmethod
    def own(cls) -> ProcessHost:
        """Return the host of this process."""
        return cls(socket.gethostname(), _text("/proc/sys/kernel/random/boot_id"), _link("/proc/self/ns/pid"))


class RunEnd(NamedTuple):
    """The state in which a run ended, and the reason if a hook or a signal ended it early."""

    state: State
    reason: str = ""


@dataclass(frozen=True)
class BatchJob:
    """A job of the batch system with the name ``scheduler`` in ``batch_systems.registry``."""

    scheduler: str
    job_id: str
    name: str


@dataclass(frozen=True)
class Status:
    """The content of ``status.json``.

    Attributes:
        state: ``submitted`` before the run starts, ``running`` until it records how it ended; never ``died``.
        step, train_steps: Number of completed steps, and of all steps.
        ranks: A description such as ``2 workers``.
        heartbeat: Number of times the file was written.
        host, pid, pid_start: The chief's process; ``pid_start`` distinguishes processes that have the same id.
        started_at: When this attempt began, in seconds since the epoch on the chief's clock.
        reason: Why a run ended early; else empty.
        job: The batch job of this attempt, if ``mpitrain submit`` has submitted it; else None.
    """

    state: State
    step: int
    train_steps: int
    ranks: str
    heartbeat: int
    host: ProcessHost
    pid: int
    pid_start: str
    started_at: float
    reason: str = ""
    job: BatchJob | None = None


class Heartbeat:
    """Writes a run's status while it runs; chief only.

    If the directory cannot be written, one warning is logged and the run continues.

    Args:
        step: Returns the current step; called from another thread.
    """

    def __init__(self, folder: Path, ranks: str, train_steps: int, step: Callable[[], int]) -> None:
        self._folder, self._step, self._warned = folder, step, False
        self._status = new_status(folder, ranks, step(), train_steps)
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._write(RunEnd("running"))
        self._thread.start()

    def end(self, end: RunEnd) -> None:
        """Write how the run ended; later calls do nothing."""
        if not self._ending.is_set():
            self.abandon()
            self._write(end)

    def abandon(self) -> None:
        """Write nothing more, because another process writes the status from now on."""
        self._ending.set()
        self._thread.join()

    def _beat(self) -> None:
        while not self._ending.wait(BEAT_S):
            self._write(RunEnd("running"))

    def _write(self, end: RunEnd) -> None:
        beat = self._status.heartbeat + 1
        self._status = replace(self._status, state=end.state, reason=end.reason, step=self._step(), heartbeat=beat)
        try:
            write(self._folder, self._status)
        except OSError as error:
            if not self._warned:
                _log.warning("%s cannot be written: %s", self._folder / STATUS, error.strerror)
            self._warned = True


def new_status(folder: Path, ranks: str, step: int = 0, train_steps: int = 0) -> Status:
    """Return the status of a run that this process begins.

    The new status has the batch job of the earlier status if the run was only submitted, or if this process is part of
    that job.
    """
    pid, before = os.getpid(), read(folder)
    job = None if before is None else before.job
    is_in_job = job is not None and job.job_id in current_job_ids(os.environ)
    if before is not None and before.state != "submitted" and not is_in_job:
        job = None  # the run was resumed outside of the job
    return Status("running", step, train_steps, ranks, 0, ProcessHost.own(), pid, pid_start(pid), time.time(), job=job)


def write_submitted(folder: Path, ranks: str, job: BatchJob) -> None:
    """Record a submitted run, whose directory may not exist yet.

    A run that has finished or is running keeps its status; the job may have started already.

    Raises:
        OSError: The directory cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    status = Status("submitted", 0, 0, ranks, 0, ProcessHost.own(), 0, "", time.time(), job=job)
    before = read(folder)
    if before is not None and before.state in ("submitted", "stopped", "failed"):
        write(folder, status)
    with contextlib.suppress(FileExistsError), (folder / STATUS).open("x", encoding="utf-8") as file:
        file.write(json.dumps(asdict(status)) + "\n")


def write(folder: Path, status: Status) -> None:
    """Replace a run directory's status atomically.

    Raises:
        OSError: The directory cannot be written.
    """
    replace_file(folder / STATUS, f"{json.dumps(asdict(status))}\n".encode())


def read(folder: Path) -> Status | None:
    """Return a run directory's status, or None if there is none or it is invalid."""
    try:
        record = json.loads((folder / STATUS).read_text(encoding="utf-8"))
        record = {_OLD_KEYS.get(key, key): value for key, value in record.items()}
        host = {_OLD_HOST_KEYS.get(key, key): value for key, value in record["host"].items()}
        values = {f.name: record[f.name] for f in fields(Status) if f.name in record and f.name not in ("host", "job")}
        job = BatchJob(**record["job"]) if record.get("job") else None
        return Status(host=ProcessHost(**{f.name: host[f.name] for f in fields(ProcessHost)}), job=job, **values)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def states(folders: Iterable[Path], watch_s: float = 3 * BEAT_S) -> dict[Path, State]:
    """Return the state of each run; takes ``watch_s`` seconds if a heartbeat must be watched for one of them."""
    run_states: dict[Path, State] = {}
    doubtful: dict[Path, int] = {}
    own_host = ProcessHost.own()
    for folder in folders:
        status = read(folder)
        state = "unknown" if status is None else classify(status, own_host, _age(folder), is_alive)
        if state in (None, "running") and has_failed(folder):
            state = "died"
        if state is None and status is not None:
            doubtful[folder] = status.heartbeat
        else:
            run_states[folder] = state or "unknown"
    if doubtful:
        time.sleep(watch_s)
    for folder, beat in doubtful.items():
        status = read(folder)
        quiet = status is None or (status.state == "running" and status.heartbeat == beat)
        run_states[folder] = "died" if quiet or status is None else status.state
    return run_states


def classify(
    status: Status, own_host: ProcessHost, age_s: float | None, alive: Callable[[int, str], bool]
) -> State | None:
    """Return the state of a run whose file was written ``age_s`` seconds ago; None if it cannot be decided.

    Args:
        own_host: The reader's host.
        age_s: Measured by the file system's clock, or by this host's clock if there is no other; None if unknown.
        alive: Returns whether the process with an id and start time is alive; called only for this host.
    """
    if status.state != "running":
        return status.state
    if status.host == own_host:
        return "running" if alive(status.pid, status.pid_start) else "died"
    if (
        status.host.hostname == own_host.hostname
        and status.host.boot_id != own_host.boot_id
        and own_host.boot_id
        and status.host.boot_id
    ):
        return "died"  # the host has been rebooted since then
    if age_s is None:
        return None
    if age_s > SKEW_S:
        return "died"
    return "running" if -BEAT_S <= age_s <= QUIET_S else None


def age_s(folder: Path) -> float:
    """Return the seconds since anything in the run's records changed; NaN if there are none."""
    times = [
        path.stat().st_mtime for name in (STATUS, "metrics.jsonl", "config.toml") if (path := folder / name).exists()
    ]
    return max(0.0, _clock_of(folder) - max(times)) if times else float("nan")


def has_failed(folder: Path) -> bool:
    """Return whether the launcher has recorded a failure after the last heartbeat."""
    try:
        return (folder / FAILURE).stat().st_mtime >= (folder / STATUS).stat().st_mtime
    except OSError:
        return False


def _age(folder: Path) -> float | None:
    try:
        return _clock_of(folder) - (folder / STATUS).stat().st_mtime
    except OSError:
        return None


def _clock_of(folder: Path) -> float:
    """Return the time by the clock that stamps files in a folder, or by this host's clock if it is not writable."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"\0")
            file.flush()
            return os.fstat(file.fileno()).st_mtime
    except OSError:
        return time.time()


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""
