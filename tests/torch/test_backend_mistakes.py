"""Wrong uses of the backend: every live rank ends with one clear reason, and none hangs."""

from __future__ import annotations

import pytest

from ..support.launch import PROGRAMS, Mpi
from ..support.named_errors import assert_named, assert_named_on_both_ranks, errors

# For each mistake: the type of the exception, and what its message must name.
ON_ALL_RANKS = {
    "other_shape": ("CollectiveFailed", r"rank 0: all_reduce sum float32 \(3,\)"),
    "other_dtype": ("CollectiveFailed", r"rank 1: all_reduce sum float64 \(3,\)"),
    "other_reduction": ("CollectiveFailed", r"rank 1: all_reduce max"),
    "other_operation": ("CollectiveFailed", r"rank 1: broadcast 0 float32 \(3,\)"),
    "other_root": ("CollectiveFailed", r"rank 1: broadcast 1"),
    "unknown_root": ("ValueError", r"no rank 2.*0 to 1"),
    "other_large_shape": ("CollectiveFailed", r"rank 1: all_reduce sum float32 \(1000001,\)"),
    "other_sizes": ("ValueError", r"rank [01] sends [23] elements to rank [01]"),
    "mixed_backends": ("ValueError", "cannot combine mpitrain with nccl"),
    "sparse_tensor": ("ValueError", "call to_dense"),
    "monitored_barrier": ("ValueError", "monitored_barrier"),
    "complex_maximum": ("ValueError", "complex"),
    "too_few_rows": ("ValueError", "2 times as many elements"),
}
ON_ONE_RANK = {
    "absent_rank": ("CollectiveFailed", r"operation 1, all_reduce sum float32 \(3, 4\).*rank 1 did not join"),
    "absent_rank_asynchronous": ("CollectiveFailed", r"operation 0, all_reduce.* timeout of 2 s.*rank 1 did not join"),
    "short_message": ("CollectiveFailed", r"recv from rank 0, float32 \(4,\): the message has 12 bytes"),
    "no_message": ("CollectiveFailed", r"recv from rank 0.*timeout"),
    "raising_rank": ("ValueError", "a mistake of the program"),
    "exiting_rank": ("CollectiveFailed", "rank 1 of this node ended"),
    "absent_in_new_group": ("LaunchError", "rank 1 had not called"),
    "low_thread_level": ("LaunchError", "MPI_THREAD_MULTIPLE"),
}


def test_mistakes_are_named_on_all_ranks(openmpi: Mpi) -> None:
    done = openmpi.run(2, "-W", "ignore", PROGRAMS / "backend_mistakes.py", *ON_ALL_RANKS, timeout=90)
    assert done.returncode == 0, done.stderr
    assert_named_on_both_ranks(done.stdout, ON_ALL_RANKS)


@pytest.mark.parametrize("name", ON_ONE_RANK)
def test_a_mistake_of_one_rank_ends_all(openmpi: Mpi, name: str) -> None:
    done = openmpi.run(2, "-W", "ignore", PROGRAMS / "backend_mistakes.py", name, timeout=90)
    assert done.returncode != 0
    (line, *others) = errors(done.stdout)
    for other in [line, *others]:
        assert_named(other, *ON_ONE_RANK[name])


def test_an_error_of_a_future_ends_the_process_with_one_line(openmpi: Mpi) -> None:
    done = openmpi.run(2, PROGRAMS / "backend_mistakes.py", "absent_rank_in_future", timeout=90)
    assert done.returncode != 0
    lines = [line for line in done.stderr.splitlines() if line.startswith("mpitrain: ")]
    assert len(lines) == 1 and "rank 1 did not join" in lines[0]


@pytest.mark.parametrize(
    ("library", "name"),
    [("openmpi", "killed_rank"), ("openmpi", "vanishing_rank"), ("mpich_with_torch", "vanishing_rank")],
)
def test_a_dead_rank_ends_the_others(request: pytest.FixtureRequest, library: str, name: str) -> None:
    mpi: Mpi = request.getfixturevalue(library)
    done = mpi.run(3, PROGRAMS / "backend_mistakes.py", name, timeout=90)
    assert "continued" not in done.stdout
    assert (
        done.returncode != 0 or mpi.name == "mpich"
    )  # MPICH's mpirun may return the status of the rank that ended first
