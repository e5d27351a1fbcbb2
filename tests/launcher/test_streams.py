"""Standard output, standard input and the terminal of ranks, with real launchers."""

from __future__ import annotations

import os
import pty
import random
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from ..support.launch import JOBS, LAUNCHER_ENVIRONMENT, Mpi
from ..support.waiting import limit, wait_until

LINES = ["=" * 90, "", "[train] [[0.1 0.2]", " [0.3 0.4]]", "[mpiexec@me] hello", "-" * 60, "Abort(3) on node 1"]
LINES += ["WARNING: twice", "WARNING: twice", "\r 10%\r 20%", "tab\tand \x1b[31mred\x1b[0m", "-" * 74, "mpirun: "]


def mpitrain_run(mpi: Mpi, folder: Path, *words: object, stdin: object = b"") -> subprocess.CompletedProcess[bytes]:
    """Execute ``mpitrain run WORDS``; ``stdin`` is what it reads, or a file."""
    source = {"input": stdin} if isinstance(stdin, bytes) else {"stdin": stdin}
    command = [str(mpi.python), "-m", "mpitrain", "run", "--run-dir", str(folder / "run"), *map(str, words)]
    environment = {**os.environ, **LAUNCHER_ENVIRONMENT}
    return subprocess.run(command, capture_output=True, timeout=limit(60), env=environment, check=False, **source)  # type: ignore[call-overload, no-any-return]


def script(folder: Path, text: str) -> Path:
    path = folder / "program.py"
    path.write_text(text)
    return path


@pytest.mark.parametrize("ranks", [1, 2])
def test_lines_that_look_like_those_of_launchers(mpi: Mpi, ranks: int, tmp_path: Path) -> None:
    path = script(tmp_path, f"import sys\nfor line in {LINES}:\n    print(line)\n    print(line, file=sys.stderr)\n")
    done = mpitrain_run(mpi, tmp_path, "-n", ranks, "--", sys.executable, path)
    assert done.returncode == 0
    for output in (done.stdout, done.stderr):
        of_first = [line for line in output.split(b"\n") if not line.startswith(b"rank 1: ")]
        assert of_first == [*(line.encode() for line in LINES), b""]
        of_second = [line[8:] for line in output.split(b"\n") if line.startswith(b"rank 1: ")]
        assert of_second == [line.encode() for line in LINES] * (ranks - 1)


@pytest.mark.parametrize("action", ["exit", "kill"])
def test_every_byte_arrives(mpi: Mpi, action: str, tmp_path: Path) -> None:
    end = "os.kill(os.getpid(), 9)" if action == "kill" else "pass"
    path = script(tmp_path, f"import os, random\nos.write(1, random.Random(0).randbytes(60_000))\n{end}\n")
    done = mpitrain_run(mpi, tmp_path, "-n", 1, "--", sys.executable, path)
    assert done.stdout == random.Random(0).randbytes(60_000)
    assert done.returncode == (action == "kill")


def test_the_first_rank_reads_standard_input_to_its_end(mpi: Mpi, tmp_path: Path) -> None:
    path = script(tmp_path, "import sys\ndata = sys.stdin.buffer.read()\nprint(len(data), hash(data[:0]) is None)\n")
    text = random.Random(0).randbytes(500_000)
    done = mpitrain_run(mpi, tmp_path, "-n", 2, "--", sys.executable, path, stdin=text)
    assert (done.returncode, sorted(done.stdout.splitlines())) == (0, [b"500000 False", b"rank 1: 0 False"])


@pytest.mark.parametrize("reader", ["sleep 4; wc -c", "while read -r -N 8192 part; do echo; sleep 0.1; done | wc -l"])
def test_a_slow_reader_gets_everything(mpi: Mpi, reader: str, tmp_path: Path) -> None:
    path = script(tmp_path, "import os\nfor i in range(20_000):\n    os.write(1, b'%08d\\n' % i)\n")
    run = f"{mpi.python} -m mpitrain run -n 2 --run-dir {tmp_path}/run -- {sys.executable} {path}"
    environment = {**os.environ, **LAUNCHER_ENVIRONMENT}
    done = subprocess.run(
        ["bash", "-c", f"{run} | ({reader})"], capture_output=True, timeout=limit(90), env=environment, check=True
    )
    size = 20_000 * (9 + 9 + len("rank 1: "))
    assert int(done.stdout) == (size if "wc -c" in reader else size // 8192)


@pytest.mark.parametrize(
    ("command", "lines"),
    [
        ('seq 1 3000 > >(while read l; do echo "[$l]"; done)', 3000),
        ("(for i in 1 2 3 4 5; do echo $i; sleep 0.2; done) & echo main", 6),
    ],
)
def test_processes_that_end_after_the_program(mpi: Mpi, command: str, lines: int, tmp_path: Path) -> None:
    done = mpitrain_run(mpi, tmp_path, "-n", 1, "--", "bash", "-c", command)
    assert len(done.stdout.splitlines()) == lines


def test_the_output_of_a_job_is_a_file_on_every_rank(openmpi: Mpi, tmp_path: Path) -> None:
    text = (JOBS / "linear.py").read_text()
    use = (
        "    import os, sys\n    sys.stdout.reconfigure(line_buffering=True)\n"
        "    sys.stdout.buffer.write(b'by the buffer\\n')\n    print('name', sys.stdout.name, sys.stdout.encoding)\n"
        "    print()\n    print('a part', end='')\n    sys.stdout.flush()\n    print(' and the rest')\n"
    )
    path = script(tmp_path, text.replace("    return Job(", f"{use}    return Job(", 1))
    done = mpitrain_run(openmpi, tmp_path, "-n", 2, path, "--train-steps", 2)
    assert done.returncode == 0, done.stderr
    printed = [line for line in done.stdout.decode().splitlines() if line.startswith("rank 1: ")]
    assert [line.rstrip() for line in printed] == [
        f"rank 1: {text}".rstrip() for text in ("by the buffer", "name <stdout> utf-8", "", "a part and the rest")
    ]


@pytest.mark.parametrize("work", ["program", "job"])
def test_a_loop_of_the_shell_keeps_its_input(openmpi: Mpi, work: str, tmp_path: Path) -> None:
    words = f"{JOBS / 'linear.py'} --train-steps 2" if work == "job" else "-- true"
    run = f"{openmpi.python} -m mpitrain run -n 2 {words} --run-dir {tmp_path}/$x"
    run = run if work == "job" else f"{openmpi.python} -m mpitrain run -n 2 --run-dir {tmp_path}/$x {words}"
    loop = f"while read x; do {run} >&2; echo $x; done; {openmpi.python} -m mpitrain --version >&2; cat"
    done = subprocess.run(
        ["bash", "-c", loop],
        input=b"a\nb\nc\n",
        capture_output=True,
        timeout=limit(120),
        env={**os.environ, **LAUNCHER_ENVIRONMENT},
        check=False,
    )
    assert done.stdout == b"a\nb\nc\n", done.stderr


@pytest.mark.parametrize("source", ["pipe", "file", "unread"])
def test_a_run_that_has_read_its_input_is_not_started_again(openmpi: Mpi, source: str, tmp_path: Path) -> None:
    read = "pass" if source == "unread" else "sys.stdin.read()"
    path = script(tmp_path, f"import sys\nprint('started')\n{read}\nsys.exit(1)\n")
    (tmp_path / "input").write_text("some input\n" * 100)
    words = ("-n", 1, "--max-restarts", 1, "--", sys.executable, path)
    if source == "file":
        with (tmp_path / "input").open() as file:
            done = mpitrain_run(openmpi, tmp_path, *words, stdin=file)
    else:
        done = mpitrain_run(openmpi, tmp_path, *words, stdin=(tmp_path / "input").read_bytes())
    assert done.stdout.count(b"started") == (2 if source == "unread" else 1)
    assert (b"standard input" in done.stderr) == (source != "unread")


class Terminal:
    """A real terminal, in which a shell runs a command."""

    def __init__(self, command: list[str], folder: Path) -> None:
        self.output, self.read_at = b"", 0.0
        self.pid, self._descriptor = pty.fork()
        if not self.pid:
            os.chdir(folder)
            os.environ |= LAUNCHER_ENVIRONMENT
            os.execvp(command[0], command)

    def expect(self, text: bytes, seconds: float = 40) -> None:
        """Read until the terminal shows a text that it has not shown before the last call."""
        deadline = time.monotonic() + limit(seconds)
        while text not in self.output:
            assert time.monotonic() < deadline, self.output
            if select.select([self._descriptor], [], [], 0.2)[0]:
                try:
                    self.output += os.read(self._descriptor, 4096)
                except OSError:  # the other end is closed
                    assert text in self.output, self.output
        self.output = self.output.partition(text)[2]

    @property
    def echoes(self) -> bool:
        return bool(termios.tcgetattr(self._descriptor)[3] & termios.ECHO)

    def type(self, text: bytes) -> None:
        os.write(self._descriptor, text)

    def wait(self) -> int:
        """Return the exit status."""
        with suppress(OSError):
            while data := os.read(self._descriptor, 4096):
                self.output += data
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    """Return a function that executes ``mpitrain WORDS`` in a terminal."""
    opened: list[Terminal] = []

    def open_terminal(mpi: Mpi, *words: object) -> Terminal:
        opened.append(Terminal([str(mpi.python), "-m", "mpitrain", *map(str, words)], tmp_path))
        return opened[-1]

    yield open_terminal
    for each in opened:
        with suppress(ProcessLookupError):
            os.kill(each.pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(each.pid, 0)


STARTS = {"-n 1": ("run", "-n", 1), "-n 2": ("run", "-n", 2), "exec": ("exec",)}


@pytest.mark.parametrize("start", STARTS)
def test_questions_on_a_terminal(mpi: Mpi, start: str, terminal: Callable[..., Terminal], tmp_path: Path) -> None:
    path = script(
        tmp_path,
        "import getpass, os\n"
        "if os.environ['RANK'] == '0':\n"
        "    print('NAME', input('name? '))\n"
        "    print('SECRET', len(getpass.getpass('password? ')))\n"
        "    value = 41\n"
        "    breakpoint()\n"
        "    print('VALUE', value)\n",
    )
    shown = terminal(mpi, *STARTS[start], "--run-dir", "run", "--", sys.executable, path)
    shown.expect(b"name? ")
    shown.type(b"Ada\n")
    shown.expect(b"NAME Ada")
    shown.expect(b"password? ")
    time.sleep(0.3)  # getpass discards what was typed before it has switched off the echo
    shown.type(b"abcdefg\n")
    shown.expect(b"SECRET 7")
    shown.expect(b"(Pdb) ")
    shown.type(b"value = value + 1\n")
    shown.expect(b"(Pdb) ")
    shown.type(b"c\n")
    shown.expect(b"VALUE 42")
    assert shown.wait() == 0
    assert b"abcdefg" not in shown.output


def test_the_terminal_is_given_to_another_rank(mpi: Mpi, terminal: Callable[..., Terminal], tmp_path: Path) -> None:
    path = script(tmp_path, "import os\nx = 5\nbreakpoint()\nprint('END', os.environ['RANK'])")
    shown = terminal(mpi, "run", "-n", 2, "--debug", 1, "--run-dir", "run", "--", sys.executable, path)
    shown.expect(b"(Pdb) ")
    shown.type(b"p x * 100\n")
    shown.expect(b"500")
    shown.type(b"c\n")
    shown.expect(b"END 1")
    assert shown.wait() == 0


def test_a_job_in_a_debugger(openmpi: Mpi, terminal: Callable[..., Terminal], tmp_path: Path) -> None:
    text = (JOBS / "linear.py").read_text()
    path = script(tmp_path, text.replace("    return Job(", "    breakpoint()\n    return Job(", 1))
    assert "breakpoint" in path.read_text()
    shown = terminal(openmpi, "run", "-n", 2, "--debug", 0, path, "--train-steps", 2, "--run-dir", "run")
    shown.expect(b"(Pdb) ")
    shown.type(b"c\n")
    assert shown.wait() == 0
    shown = terminal(openmpi, "run", "-n", 2, "--debug", 2, path, "--run-dir", "run2")
    assert shown.wait() == 2
    assert b"--debug 2" in shown.output


def test_the_echo_of_a_terminal_comes_back(mpi: Mpi, terminal: Callable[..., Terminal], tmp_path: Path) -> None:
    path = script(tmp_path, "import getpass\ngetpass.getpass('password? ')")
    shown = terminal(mpi, "run", "-n", 1, "--run-dir", "run", "--", sys.executable, path)
    shown.expect(b"password? ")
    wait_until(lambda: not shown.echoes, "the echo is off")
    shown.type(b"\x03")
    assert shown.wait() != 0
    assert shown.echoes


def test_ctrl_c_ends_a_program_that_waits_for_input(
    mpi: Mpi, terminal: Callable[..., Terminal], tmp_path: Path
) -> None:
    shown = terminal(mpi, "run", "-n", 1, "--run-dir", "run", "--", sys.executable, script(tmp_path, "input('name? ')"))
    shown.expect(b"name? ")
    shown.type(b"\x03")
    assert shown.wait() != 0


def test_ctrl_c_ends_a_stopped_program(mpi: Mpi, terminal: Callable[..., Terminal], tmp_path: Path) -> None:
    path = script(tmp_path, "import os, time\nprint('HERE', flush=True)\nos.kill(os.getpid(), 19)\ntime.sleep(60)")
    shown = terminal(mpi, "run", "-n", 1, "--run-dir", "run", "--", sys.executable, path)
    shown.expect(b"HERE")
    time.sleep(2.0)
    shown.type(b"\x03")
    assert shown.wait() != 0
    assert b"kill -CONT" in shown.output


def test_the_output_of_mpirun_as_the_user_wants_it(openmpi: Mpi, tmp_path: Path) -> None:
    done = mpitrain_run(openmpi, tmp_path, "-n", 2, "--launcher-args", "--tag-output", "--", "echo", "hello")
    assert re.search(rb"\[\S*,0\]<stdout>: hello", done.stdout)


def test_words_that_mpirun_would_change(mpi: Mpi, tmp_path: Path) -> None:
    words = ["--map-by", "core", "--bind-to", "a b", "--rank-by", "$HOME", "--", "'"]
    done = mpitrain_run(mpi, tmp_path, "-n", 1, "--", sys.executable, "-c", "import sys; print(sys.argv[1:])", *words)
    assert done.stdout.decode().strip() == repr(words), done.stderr


def test_what_a_rank_writes_before_it_aborts_the_run_arrives(mpi: Mpi, tmp_path: Path) -> None:
    path = script(
        tmp_path,
        "from mpi4py import MPI\ncomm = MPI.COMM_WORLD\ncomm.Barrier()\n"
        "if comm.rank == 1:\n    print('a line\\nlast words', end='', flush=True)\n    comm.Abort(7)\n"
        "comm.Barrier()\n",
    )
    done = mpitrain_run(mpi, tmp_path, "-n", 2, path)
    assert (done.returncode, done.stdout) == (1, b"rank 1: a line\nrank 1: last words"), done.stderr
