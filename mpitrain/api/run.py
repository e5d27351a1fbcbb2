"""A ``Run`` follows and stops a run, from scripts and notebooks."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .. import checkpoint
from ..batch_systems.registry import SYSTEMS
from ..errors import LaunchError, RecordError, RunFailed
from ..inference.model import TrainedModel, load
from ..launcher.batch.scheduler import cancel
from ..monitor import heartbeat
from ..monitor.heartbeat import ENDED
from ..plan.job import Job
from ..plan.network import TorchModule
from ..process.run_directory import LEARNERS, launcher_of, read_failure, request_stop
from ..process.signals import STOPPED_EARLY
from ..report.history import METRICS, Tail, is_run, open_run
from ..report.page import collect, page
from ..report.runs import described_states

_OUTPUT = "output.log"
_POLL_S = 0.1
_ASK_S = 2.0  # interval at which the state of a run that another process supervises is read
# Exit statuses of a run that received two signals, or was stopped at its start.
_ENDED_AT_ONCE = (128 + signal.SIGINT, -signal.SIGINT)


@dataclass(frozen=True)
class RunStatus:
    """The state of a run.

    Attributes:
        state: ``submitted`` or ``starting``, then ``running``. At the end ``finished``, ``finished early`` (ended by a
            hook), ``stopped`` (before the last step, can be resumed), ``failed`` or ``died``. ``unknown`` if there is
            no valid record.
        step: Number of completed steps, a few seconds old.
        train_steps: Number of all steps; 0 before the run starts.
        reason: Why the run ended early; else empty.
    """

    state: str
    step: int = 0
    train_steps: int = 0
    reason: str = ""


class Run:
    """A run, found by its run directory; ``launch``, ``submit`` or any other command may have started it.

    Args:
        path: The run directory.

    Attributes:
        path: The absolute path of the run directory.

    Raises:
        RecordError: The directory does not exist.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()
        if not self.path.is_dir():
            raise RecordError(f"{path}: no such directory; give a run directory, such as runs/JOB-TIME")
        self._process: subprocess.Popen[bytes] | None = None  # the supervisor, if this process started it
        self._stop_requested = False  # whether ``stop`` has interrupted that supervisor
        self._before: heartbeat.Status | None = None  # the run's status when this process started it
        self._shown: dict[Path, int] = {}  # bytes of output that ``wait`` has printed
        self._make_job: Callable[[], Job] | None = None  # set if ``train`` has made this object

    def __repr__(self) -> str:
        status = self.status
        return f"Run({str(self.path)!r}): {status.state}, step {status.step:,} of {status.train_steps:,}"

    @property
    def status(self) -> RunStatus:
        """The present state and step of the run. For a run on another host, reading this property may take 15 s."""
        recorded = heartbeat.read(self.path)
        is_old = self._is_old(recorded)
        if is_old and self._is_supervised():
            return RunStatus("starting")
        if is_old and self._process is not None and self._process.returncode:
            return RunStatus("failed")
        state, _ = described_states([self.path])[self.path]
        if recorded is None:
            return RunStatus(state)
        return RunStatus(state, recorded.step, recorded.train_steps, recorded.reason)

    def _is_old(self, status: heartbeat.Status | None) -> bool:
        """Return whether ``status`` is missing, or was written before this process started the run."""
        return status is None or (self._before is not None and status.started_at == self._before.started_at)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of ``metrics.jsonl`` so far, as a list of dicts, from which pandas makes a DataFrame.

        Keys are ``step``, ``time_s``, and the measured values: ``loss``, ``learning_rate``, ``examples_per_s``,
        ``validation_loss`` and others. A line has the values that were measured at its step.
        """
        if not is_run(self.path):
            return []
        run = open_run(self.path)
        run.add(Tail(self.path / METRICS).read())
        return run.lines

    @property
    def checkpoints(self) -> list[Path]:
        """The checkpoints, oldest first; not verified."""
        return [*reversed(checkpoint.steps(self.path / "checkpoints").values())]

    def model(self, *, averages: bool = False, best: bool = False) -> TrainedModel | TorchModule:
        """Return the model of the newest checkpoint, or of the best one, for inference; see ``mpitrain.load``."""
        path = self.path / checkpoint.BEST if best else self.path
        return load(path, averages=averages, model=self._make_job() if self._make_job is not None else None)

    def report(self, output: str | os.PathLike[str] | None = None) -> Path:
        """Write a web page with plots of the run, and return its path.

        Args:
            output: The file to write; ``report.html`` in the run directory by default.
        """
        target = self.path / "report.html" if output is None else Path(output)
        target.write_text(page(collect([self.path])), encoding="utf-8")
        return target

    def wait(self, timeout: float | None = None, *, show: bool = True) -> RunStatus:
        """Wait until the run ends; return its final status.

        A ``KeyboardInterrupt``, such as from a notebook's stop button, stops the run, which saves a checkpoint. It is
        raised again when the run has ended. A second ``KeyboardInterrupt`` ends the run without saving.

        Args:
            timeout: Seconds; None for no limit.
            show: Whether to print the run's output, such as its progress.

        Raises:
            RunFailed: The run failed, or its processes have died.
            TimeoutError: The run has not ended after ``timeout`` seconds; it continues.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        interrupt: KeyboardInterrupt | None = None
        while True:
            try:
                if self._wait_a_moment(show):
                    break
            except KeyboardInterrupt as error:
                interrupt = error
                with contextlib.suppress(LaunchError):
                    self.stop()
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"the run in {self.path} has not ended after {timeout:g} s")
        status = self._end()
        if interrupt is not None:
            raise interrupt
        return status

    def stop(self) -> None:
        """Request that the run saves a checkpoint and ends; return immediately. A second call ends it without saving.

        Raises:
            LaunchError: Nothing looks for the request, or the run directory cannot be written.
        """
        if self._process is not None:
            if self._process.poll() is None:
                self._stop_requested = True
                self._process.send_signal(signal.SIGINT)
            return
        status = heartbeat.read(self.path)
        if status is not None and status.job is not None:
            if self.status.state not in ENDED:
                cancel(status.job, running=status.state == "running")
                if status.state == "submitted":
                    heartbeat.write(self.path, replace(status, state="stopped", reason="removed from the queue"))
        elif (launcher := launcher_of(self.path)) is not None and launcher.is_local:
            with contextlib.suppress(ProcessLookupError):  # the process has just ended
                os.kill(launcher.pid, signal.SIGINT)
        elif launcher is not None or self.status.state == "running":
            request_stop(self.path)

    def _start(self, words: Sequence[str]) -> None:
        """Start ``mpitrain run`` in a new session, so that signals to this process group do not reach the run."""
        self._skip_output()
        self._before = heartbeat.read(self.path)
        with (self.path / _OUTPUT).open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "mpitrain", "run", *words],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_accept_interrupts,
            )

    def _is_supervised(self) -> bool:
        """Return whether a process supervises the run: on this host, or on another host where it may still exist."""
        if self._process is not None:
            return self._process.poll() is None
        return launcher_of(self.path) is not None

    def _wait_a_moment(self, show: bool) -> bool:
        """Wait briefly, and print new output; return whether the run has ended."""
        ended = not self._is_supervised() and (self._process is not None or self._has_ended())
        if show:
            self._show()
        if not ended:
            time.sleep(_POLL_S if self._process is not None else _ASK_S)
        return ended

    def _has_ended(self) -> bool:
        """Return whether a run that no process on this host supervises has ended.

        A run that Slurm requeues has not ended. On Flux and PBS a requeued run counts as ended, because the new job has
        another id. On LSF it counts as ended, because the states of jobs are not queried.
        """
        state, recorded = self.status.state, heartbeat.read(self.path)
        job = None if recorded is None else recorded.job
        if state in ("stopped", "died") and job is not None and job.scheduler in SYSTEMS:
            job_state = SYSTEMS[job.scheduler].states([job.job_id]).get(job.job_id)
            return job_state is None or job_state.has_ended
        return state in (*ENDED, "unknown")

    def _outputs(self) -> list[Path]:
        """Return the files with the output of the run, and of its batch jobs."""
        logs = sorted(path for path in (self.path / "batch").glob("*") if path.suffix != ".sh")
        return [self.path / _OUTPUT, *logs]

    def _skip_output(self) -> None:
        """Skip the output so far, which is from earlier starts of the run."""
        for path in self._outputs():
            with contextlib.suppress(OSError):
                self._shown[path] = path.stat().st_size

    def _show(self) -> None:
        """Print the output that was not printed yet."""
        for path in self._outputs():
            with contextlib.suppress(OSError), path.open("rb") as file:
                file.seek(self._shown.get(path, 0))
                text = file.read()
                if text:
                    self._shown[path] = file.tell()
                    sys.stdout.write(text.decode(errors="replace"))
                    sys.stdout.flush()

    def _end(self) -> RunStatus:
        """Return the state of a run that has ended.

        Raises:
            RunFailed: The run failed.
        """
        status = self.status
        code = 0 if self._process is None else self._process.returncode
        # While Python imports its first modules, an interrupt ends it with status 1.
        if code in _ENDED_AT_ONCE or (self._stop_requested and code and self._is_old(heartbeat.read(self.path))):
            return replace(status, state="stopped", reason="ended without saving")
        has_failed = status.state in ("failed", "died") or (status.state == "unknown" and self._process is None)
        if code in (0, STOPPED_EARLY) and not has_failed:
            return status
        failure = read_failure(self.path)
        if failure is None:
            reason = self._last_message() or f"the run in {self.path} has ended; its state is {status.state}"
            raise RunFailed(reason, None, "", str(self.path))
        raise RunFailed(failure.reason, failure.rank, failure.traceback, str(self.path))

    def _last_message(self) -> str:
        """Return the last message of mpitrain in the newest output; empty if there is none."""
        newest = max(
            (path for path in self._outputs() if path.is_file()), key=lambda path: path.stat().st_mtime, default=None
        )
        lines = [] if newest is None else newest.read_text(encoding="utf-8", errors="replace").splitlines()
        return next((line for line in reversed(lines) if line.startswith("mpitrain:")), "")


def _accept_interrupts() -> None:
    """Accept SIGINT, which ``stop`` sends: shells start background processes with SIGINT ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def stop_runs(run_dir: Path) -> Iterator[tuple[Path, str]]:
    """Stop a run, or all learners of a run; yield each directory with the state in which it has ended, as text.

    Raises:
        LaunchError: The directory is not that of a live run.
    """
    learners = sorted(path for path in (run_dir / LEARNERS).glob("*") if path.is_dir())
    runs = [Run(path) for path in learners or [run_dir]]
    alive = [run for run in runs if run._is_supervised() or run.status.state in ("running", "submitted")]
    if not alive:
        raise LaunchError(f"{run_dir} is not the directory of a live run")
    for run in alive:
        run.stop()
    for run in alive:
        while not run._wait_a_moment(show=False):
            pass
        state = run.status.state
        yield run.path, "ended while it was starting; nothing was saved" if state == "unknown" else state
