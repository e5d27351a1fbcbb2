"""Kills one process of each run at a random moment; checks that the run ends or continues, and leaves nothing.

    python bench/faults.py [COUNT] [--hosts] [--load N]

In each run one random process is killed by SIGKILL: a rank, a rank's reaper, the launcher (mpirun) or the supervisor
(mpitrain run). With --hosts it may also be a daemon of the launcher. The mode is random; every second run has
--max-restarts 1. With --hosts the ranks are on three hosts, made of network namespaces (needs root and iproute2). With
--load, N busy processes compete for the cores. Prints one line per kill, and a summary.

After a kill a run must end within 60 s with status 1, or with --max-restarts finish with status 0. A run whose
supervisor was killed is started again in its run directory, and must finish. Then no file in /dev/shm or the folder for
temporary files, no .ranks, no partial checkpoint and no process may be left.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from mpitrain.process import rank_status  # noqa: E402
from mpitrain.process.host_watcher import temporary_files  # noqa: E402
from tests.support.hosts.network import Hosts, make_hosts  # noqa: E402
from tests.support.kills import ranks_of  # noqa: E402

JOB = ROOT / "tests" / "support" / "jobs" / "hanging.py"
STEPS = 400  # of at least 5 ms
SERVER = ("--ps", "1", "--ps-placement", "first")
MODES = {
    "sync": (),
    "local": ("--mode", "local"),
    "async": ("--mode", "async", *SERVER),
    "ssp": ("--mode", "ssp", *SERVER),
    "backup": ("--mode", "backup", *SERVER),
}
VICTIMS = ("rank", "rank", "reaper", "launcher", "supervisor")
ENDS_WITHIN_S, FINISHES_WITHIN_S = 60.0, 180.0


@dataclass
class Kill:
    """One run and the process that it loses."""

    mode: str
    victim: str
    rank: int
    after_s: float
    restarts: bool
    hosts: Hosts | None
    folder: Path

    def inject(self) -> tuple[str, float]:
        """Start the run and kill the process; return the problem, empty if none, and the seconds to the run's end."""
        before = set(temporary_files(0))
        with self._start() as process:
            try:
                pid = self._victim(process)
                if pid is None:
                    return "", 0.0  # the run ended before the kill
                with contextlib.suppress(ProcessLookupError):  # the process has just ended
                    os.kill(pid, signal.SIGKILL)
                began = time.monotonic()
                process.wait(timeout=FINISHES_WITHIN_S if self.restarts else ENDS_WITHIN_S)
                took_s = time.monotonic() - began
            except subprocess.TimeoutExpired:
                process.kill()
                return "the run does not end", float("nan")
        status = process.returncode
        if self.victim == "supervisor":
            with self._start() as again:
                status = again.wait(timeout=FINISHES_WITHIN_S)
        expected = 0 if self.restarts or self.victim == "supervisor" else 1
        finished = status == 0 and self.folder.joinpath("checkpoints", f"step-{STEPS:010}.h5").exists()
        if status != expected and not finished:
            return f"status {status}: {self._output()[-500:]}", took_s
        return self._left(before), took_s

    def _start(self) -> subprocess.Popen[bytes]:
        words = [str(JOB), "--kind", "none", "--steps", str(STEPS), "--save-steps", "20", "--log-steps", "0"]
        words += ["--run-dir", str(self.folder), *(("--max-restarts", "1") if self.restarts else ())]
        words += MODES[self.mode]
        if self.hosts is None:
            command, environment = [sys.executable, "-m", "mpitrain", "run", "-n", "3", *words], {}
        else:
            command = self.hosts.run(Path(sys.executable), [1, 1, 1], *words)
            environment = self.hosts.environment
        with self._log.open("ab") as output:
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env={**os.environ, **environment}
            )

    def _victim(self, process: subprocess.Popen[bytes]) -> int | None:
        """Wait; return the id of the process to kill, or None if the run ends or its ranks do not start in 120 s."""
        deadline = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < deadline:
            statuses = {status.rank: status for status in rank_status.read(self.folder)}
            if len(statuses) == 3:
                time.sleep(self.after_s)
                if process.poll() is not None:
                    return None
                own, status = process.pid, statuses[self.rank]
                if self.victim == "daemon":
                    return parent_of(status.reaper)
                pids = {"rank": status.pid, "reaper": status.reaper, "supervisor": own}
                return pids.get(self.victim) or first_child_of(own)
            time.sleep(0.02)
        return None

    def _left(self, before: set[str]) -> str:
        """Return a text of the files and processes that the run has left after up to 20 s; empty if there are none."""
        deadline = time.monotonic() + 20
        while True:
            left = [*sorted({*temporary_files(0)} - before), *map(str, self.folder.glob("checkpoints/*.partial"))]
            left += [str(path) for path in [self.folder / ".ranks"] if path.exists()]
            left += [f"process {pid}" for pid in ranks_of(self.folder)]
            if not left or time.monotonic() > deadline:
                return f"left behind: {', '.join(left)}" if left else ""
            time.sleep(0.2)

    @property
    def _log(self) -> Path:
        return self.folder.with_suffix(".log")

    def _output(self) -> str:
        return self._log.read_text(errors="replace")


def first_child_of(pid: int) -> int | None:
    """Return the process id of the first child of a process (of a supervisor: the launcher), or None."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(children[0]) if children else None


def parent_of(pid: int) -> int:
    """Return the process id of a process's parent."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@contextmanager
def load(processes: int) -> Iterator[None]:
    """Keep the cores busy with this number of processes."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def main() -> None:
    """Run and kill as requested, and print the summary."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int, nargs="?", default=10)
    parser.add_argument("--hosts", action="store_true")
    parser.add_argument("--load", type=int, default=0, metavar="N")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    draw = random.Random(given.seed)
    context = make_hosts(Path(sys.executable), 3) if given.hosts else nullcontext(None)
    victims: Sequence[str] = (*VICTIMS, "daemon") if given.hosts else VICTIMS
    right, longest_s = 0, 0.0
    with context as hosts, tempfile.TemporaryDirectory() as folder, load(given.load):
        for number in range(given.count):
            mode, victim, rank = draw.choice(list(MODES)), draw.choice(victims), draw.randrange(3)
            after_s, restarts = draw.uniform(0, 4), number % 2 == 1
            kill = Kill(mode, victim, rank, after_s, restarts, hosts, Path(folder, str(number)))
            wrong, took_s = kill.inject()
            right += not wrong
            if not restarts:
                longest_s = max(longest_s, took_s)
            name = f"{victim} {rank}" if victim in ("rank", "reaper", "daemon") else victim
            words = f"{number:3d}  {mode:6} {name:10} after {after_s:3.1f} s  restarts {int(restarts)}  {took_s:5.1f} s"
            print(f"{words}  {wrong or 'ok'}", flush=True)
    print(
        f"{right} of {given.count} as expected; without restarts a run ended at most {longest_s:.1f} s after the kill"
    )


if __name__ == "__main__":
    main()
