"""The filter removes only the launcher's message about a rank that has printed its own error."""

from __future__ import annotations

import pytest

from mpitrain.launcher.output_filter import LauncherFilter

RULE = "-" * 74 + "\n"
EXITED = (
    RULE + "prterun detected that one or more processes exited with non-zero status,\n"
    "thus causing the job to be terminated. The first process to do so was:\n\n   Exit code:    2\n" + RULE
)
ABORTED = RULE + "MPI_ABORT was invoked on rank 1 in communicator MPI_COMM_WORLD\n" + RULE
NO_SLOTS = RULE + "There are not enough slots available in the system\n" + RULE
MPICH_ABORT = "Abort(3) on node 1 (rank 1 in comm 0): application called MPI_Abort(MPI_COMM_WORLD, 3) - process 1\n"
BAR = "  3%|#         | 3/100\r  4%|#         | 4/100"

CASES = [
    ("mpitrain: no file\n" + EXITED, "mpitrain: no file\n"),
    (ABORTED + "a\n" + EXITED + "b\n", "a\nb\n"),
    (NO_SLOTS, NO_SLOTS),
    (MPICH_ABORT + "x", "x"),
    (BAR, BAR),
    ("a part without end", "a part without end"),
    ("----\n---- a short rule\n", "----\n---- a short rule\n"),
    (RULE + "a block that never ends\n", RULE + "a block that never ends\n"),
    ("", ""),
]


@pytest.mark.parametrize(("output", "shown"), CASES)
@pytest.mark.parametrize("size", [1, 2, 100])
def test_filter(output: str, shown: str, size: int) -> None:
    stream = LauncherFilter()
    lines = output.encode().splitlines(keepends=True)
    got = b"".join(stream.feed(b"".join(lines[i : i + size])) for i in range(0, len(lines), size)) + stream.rest()
    assert got.decode() == shown
    assert stream.output == output.encode()


def test_a_rule_that_a_rank_prints_does_not_swallow_what_follows() -> None:
    lines = "".join(f"line {number}\n" for number in range(100))
    assert LauncherFilter().feed((RULE + lines).encode()).decode() == RULE + lines
