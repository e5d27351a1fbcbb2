"""What ranks write arrives whole, in order and soon; what they read is the user's standard input, and its end."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from mpitrain.launcher.standard_input import StandardInput
from mpitrain.launcher.stream_server import MergedOutput, Source, StreamServer
from mpitrain.process import stream_client

from ...support.waiting import limit, wait_until

CONNECT = "from mpitrain.process import stream_client; stream_client.connect(); "


class Ranks:
    """A server, and processes that are its ranks."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, text: str, local: bool) -> None:
        self.folder, self._local = folder, local
        (folder / "input").write_text(text)
        self._streams = {name: (folder / name).open("w") for name in ("stdout", "stderr")}
        for name, stream in self._streams.items():
            monkeypatch.setattr(sys, name, stream)
        saved, given = os.dup(0), os.open(folder / "input", os.O_RDONLY)
        os.dup2(given, 0)
        self.input = StandardInput()
        os.dup2(saved, 0)
        self.server = StreamServer(self.input, 0, is_remote=True, network=None)
        self.server.start()

    def run(self, *programs: str) -> None:
        """Run a program on each rank, and wait for the end of all."""
        description = self.server.description
        if not self._local:  # another host: the socket of this one is not there
            token, rank, _ = stream_client.json.loads(description)
            port = self.server._listening[1].getsockname()[1]
            description = stream_client.json.dumps([token, rank, [("127.0.0.1", port)]])
        running = []
        for rank, program in enumerate(programs):
            code = ("stream_client.socket_name = lambda token: '\\0nothing'; " if not self._local else "") + "{}"
            code = "import os, sys, time; from mpitrain.process import stream_client; " + code.format(
                f"stream_client.connect(); {program}"
            )
            environment = {**os.environ, stream_client.VARIABLE: description, "PMI_RANK": str(rank)}
            running.append(subprocess.Popen([sys.executable, "-c", code], env=environment, stdin=subprocess.DEVNULL))
        for process in running:
            process.wait(limit(30))
        self.server.close(lambda: False)
        self.input.poll()

    def read(self, name: str) -> bytes:
        return (self.folder / name).read_bytes()


@pytest.fixture(params=["same host", "other host"])
def ranks(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ranks:
    text = "first\nsecond\n" * 10_000
    return Ranks(tmp_path, monkeypatch, text, request.param == "same host")


def test_every_byte_arrives(ranks: Ranks) -> None:
    data = random.Random(0).randbytes(300_000)
    ranks.run("import random; sys.stdout.buffer.write(random.Random(0).randbytes(300_000)); sys.stderr.write('e')")
    assert ranks.read("stdout") == data
    assert ranks.read("stderr") == b"e"


def test_the_first_rank_reads_the_input_and_its_end(ranks: Ranks) -> None:
    write = "os.write(1, b'{} %d\\n' % len(sys.stdin.read()))"  # a print can be several writes, with others' between
    ranks.run(write.format("first"), write.format("other"))
    assert sorted(ranks.read("stdout").splitlines()) == [b"first 130000", b"other 0"]
    assert ranks.input.was_read


def test_input_that_nobody_reads(ranks: Ranks) -> None:
    ranks.run("pass")
    assert not ranks.input.was_read or not ranks._local  # what is sent to another host counts as read


def test_what_a_killed_rank_has_written_arrives(ranks: Ranks) -> None:
    ranks.run("sys.stdout.write('x' * 1000 + 'end'); sys.stdout.flush(); os.kill(os.getpid(), 9)")
    assert ranks.read("stdout") == b"x" * 1000 + b"end"


def test_lines_of_ranks_do_not_mix(ranks: Ranks) -> None:
    write = "[os.write(1, part) for _ in range(300) for part in (b'{0}' * 50, b'{0}' * 50 + b'\\n')]"
    ranks.run(*(write.format(letter) for letter in "abc"))
    output = ranks.read("stdout")
    assert all(len({*line}) <= 1 for line in output.splitlines())  # a line may be divided if its writer is slow
    assert [output.count(letter) for letter in (b"a", b"b", b"c")] == [30_000] * 3


def test_others_are_refused(ranks: Ranks) -> None:
    local, remote = ranks.server._listening
    for family, address in (
        (socket.AF_UNIX, local.getsockname()),
        (socket.AF_INET, ("127.0.0.1", remote.getsockname()[1])),
    ):
        with socket.socket(family) as connection:
            connection.settimeout(limit(10))
            connection.connect(address)
            connection.sendall(stream_client.HEADER.pack(b"0" * 32, 0, 1))
            assert connection.recv(1) == b""
    ranks.run("print('still there')")
    assert ranks.read("stdout") == b"still there\n"


def test_without_a_connection_the_streams_stay(tmp_path: Path) -> None:
    description = stream_client.describe("0" * 32, 0, [("127.0.0.1", 9)])
    done = subprocess.run(
        [sys.executable, "-c", f"{CONNECT}print(input())"],
        env={**os.environ, stream_client.VARIABLE: description},
        input="text",
        capture_output=True,
        text=True,
        timeout=limit(30),
        check=True,
    )
    assert done.stdout == "text\n"
    assert "127.0.0.1:9" in done.stderr


def test_a_part_of_a_line_arrives_without_the_rest(tmp_path: Path) -> None:
    with open(tmp_path / "out", "w+b") as file:
        merged, (reading, writing) = MergedOutput(file), os.pipe()
        merged.start()
        merged.add(reading, Source(0))
        os.write(writing, b"name? ")
        wait_until(lambda: (tmp_path / "out").read_bytes() == b"name? ", "the output")
        reading_of_other, writing_of_other = os.pipe()
        merged.add(reading_of_other, Source(1))
        os.write(writing_of_other, b"a line\n")
        wait_until(lambda: (tmp_path / "out").read_bytes() == b"name? \na line\n", "the output")
        os.close(writing)
        os.close(writing_of_other)
        merged.finish(lambda: False)
        assert not merged.is_alive()


def test_writers_wait_while_nothing_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    blocked, unblock = os.pipe()
    with open(unblock, "wb", buffering=0) as stream:
        merged, (reading, writing) = MergedOutput(stream), os.pipe()
        merged.start()
        merged.add(reading, Source(0))
        os.set_blocking(writing, False)
        written = 0
        with contextlib.suppress(BlockingIOError):
            for _ in range(1000):
                written += os.write(writing, b"x" * 1023 + b"\n")
                threading.Event().wait(0.001)
        assert written < 1_000_000
        received = b""
        os.close(writing)
        while len(received) < written:
            received += os.read(blocked, 1 << 16)
        merged.finish(lambda: False)
    assert received == (b"x" * 1023 + b"\n") * (written // 1024)
    os.close(blocked)


def test_two_files_per_rank_may_exceed_the_limit_which_ranks_keep() -> None:
    code = (
        "import os, resource\n"
        "from mpitrain.launcher.launcher_process import LauncherProcess\n"
        "from mpitrain.launcher.standard_input import StandardInput\n"
        "from mpitrain.launcher.stream_server import StreamServer\n"
        "streams = StreamServer(StandardInput(), None, False, None)\n"
        "with LauncherProcess(['bash', '-c', 'echo $(ulimit -Sn)'], os.environ, streams) as launcher:\n"
        "    pipes = [os.pipe() for _ in range(60)]\n"
        "streams.close(lambda: False)\n"
    )
    command = f'ulimit -Sn 64; exec "{sys.executable}" -c "$0"'
    done = subprocess.run(
        ["bash", "-c", command, code], capture_output=True, text=True, timeout=limit(30), stdin=subprocess.DEVNULL
    )
    assert (done.returncode, done.stdout) == (0, "64\n"), done.stderr
