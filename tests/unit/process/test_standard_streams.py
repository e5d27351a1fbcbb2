"""A process that was started without standard streams."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys
from mpitrain.process.standard_streams import open_closed_streams

open_closed_streams()
with open(sys.argv[1], "w") as file:
    print("printed", flush=True)
    print("printed", file=sys.stderr, flush=True)
    sys.__stdout__.write("printed")
    file.write(str(file.fileno() > 2))
"""


def test_output_that_cannot_be_written_is_discarded() -> None:
    program = "from mpitrain.monitor.console import Console\nfor line in 'ab':\n    Console(0).print(line)"
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", program], stdout=full, stderr=subprocess.PIPE, timeout=30)
    assert (done.returncode, done.stderr) == (0, b"")


def test_what_is_printed_does_not_get_into_files(tmp_path: Path) -> None:
    words = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", PROGRAM, str(tmp_path / "file")]
    subprocess.run(words, check=True, timeout=30)
    assert (tmp_path / "file").read_text() == "True"


def test_characters_that_the_encoding_lacks_are_printed_as_escape_sequences() -> None:
    program = (
        "from mpitrain.process.standard_streams import open_closed_streams\nopen_closed_streams()\n"
        "print(b'a\\xff'.decode(errors='surrogateescape'), chr(0x2501))"
    )
    ascii = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    done = subprocess.run([sys.executable, "-c", program], env={**os.environ, **ascii}, capture_output=True, timeout=30)
    assert (done.stdout, done.stderr) == (b"a\\udcff \\u2501\n", b"")
