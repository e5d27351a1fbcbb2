"""Wrong uses of Horovod's API: each is an exception with one line on all ranks, and no rank hangs."""

from __future__ import annotations

import re

import pytest

from ..support.launch import PROGRAMS, Mpi
from ..support.named_errors import assert_named, assert_named_on_both_ranks, errors

INTERNAL = "HorovodInternalError"

# For each mistake: the type of the exception, and what its message must name.
ON_ALL_RANKS = {
    "other_shape": (INTERNAL, r"'x'.*rank 0: allreduce Average float32 \(3,\); rank 1: .*\(4,\)"),
    "other_dtype": (INTERNAL, r"rank 0: allreduce Average float32 \(3,\); rank 1: allreduce Average int64"),
    "other_reduction": (INTERNAL, r"rank 0: allreduce Sum .*; rank 1: allreduce Max"),
    "other_scale": (INTERNAL, r"rank 1: .*prescale 2"),
    "other_operation": (INTERNAL, r"rank 0: allreduce .*; rank 1: broadcast"),
    "other_operation_without_name": (INTERNAL, r"rank 0: allreduce .*; rank 1: allgather"),
    "other_root": (INTERNAL, r"rank 0: broadcast root 0 .*; rank 1: broadcast root 1"),
    "other_columns": (INTERNAL, r"rank 0: allgather float32 \(any, 3\); rank 1: allgather float32 \(any, 4\)"),
    "other_process_set": (INTERNAL, r"rank 0: add_process_set \(0,\); rank 1: add_process_set \(1,\)"),
    "gather_after_join": ("HorovodInternalError|RuntimeError", r"rank 0 (has|called) join"),
    "gathered_scalar": ("ValueError", "allgather.*dimension"),
    "number_as_tensor": ("ValueError", "allreduce.*float"),
    "number_in_group": ("ValueError", "allreduce.*float"),
    "no_tensors": ("ValueError", "allreduce"),
    "sparse_tensor": ("ValueError", "allreduce.*sparse_allreduce_async"),
    "text_as_compression": ("ValueError", "compression.*'fp16'"),
    "number_as_handle": ("ValueError", "12345"),
    "model_as_optimizer": ("ValueError", "Linear"),
    "distributed_twice": ("ValueError", "DistributedOptimizer"),
    "elastic_without_state": ("ValueError", "State.*3"),
    "unknown_root": ("ValueError", r"rank 2 .*\[0, 1\]"),
    "duplicate_name": ("ValueError", r"'x'.*submitted before"),
    "indivisible_rows": ("ValueError", r"3 rows.*2 ranks"),
    "too_many_rows": ("ValueError", r"\[2, 2\].*3 rows"),
    "scalar": ("ValueError", "reducescatter.*dimension"),
    "unknown_rank_in_set": ("ValueError", r"\[0, 2\].*0 to 1"),
    "duplicate_set": ("ValueError", r"\[0, 1\] already"),
    "foreign_set": ("ValueError", "rank [01] does not"),
    "integers_by_adasum": ("ValueError", "Adasum.*int32"),
    "gradient_of_minimum": ("NotImplementedError", "Min has no gradient"),
    "twice_backward": ("AssertionError", "backward_passes_per_step"),
    "early_zero_grad": ("AssertionError", "zero_grad"),
    "unnamed_parameter": ("ValueError", "lacks 1 "),
    "predivided_sum": ("ValueError", "op=Average, not Sum"),
    "not_initialized": ("ValueError", "hvd.init"),
}
ON_ONE_RANK = {
    "absent_rank": (INTERNAL, r"'x' has waited .*rank 1, which has not submitted it|rank 0 shut down"),
    "exiting_rank": (INTERNAL, "rank 1 shut down or ended"),
    "shut_down_rank": ("HorovodInternalError|ValueError", "rank 1 (shut down or ended|does not)"),
}


def test_mistakes_are_named_on_all_ranks(openmpi: Mpi) -> None:
    done = openmpi.run(2, "-W", "ignore", PROGRAMS / "horovod_mistakes.py", *ON_ALL_RANKS, timeout=90)
    assert done.returncode == 0, done.stderr
    assert_named_on_both_ranks(done.stdout, ON_ALL_RANKS)


@pytest.mark.parametrize(
    ("library", "name"), [*(("openmpi", name) for name in ON_ONE_RANK), ("mpich_with_torch", "exiting_rank")]
)
def test_a_rank_that_does_not_come_is_named(request: pytest.FixtureRequest, library: str, name: str) -> None:
    mpi: Mpi = request.getfixturevalue(library)
    settings = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "1", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "5"}
    done = mpi.run(2, "-W", "ignore", PROGRAMS / "horovod_mistakes.py", name, timeout=90, env=settings)
    (line, *others) = errors(done.stdout)
    for other in [line, *others]:
        assert_named(other, *ON_ONE_RANK[name])
    if name == "absent_rank":
        assert re.search(r"mpitrain: allreduce 'x' has waited \d s for rank 1", done.stderr)


@pytest.mark.parametrize("name", ["raising_rank", "killed_rank"])
def test_a_dead_rank_ends_the_others(openmpi: Mpi, name: str) -> None:
    done = openmpi.run(3, PROGRAMS / "horovod_mistakes.py", name, timeout=90)
    assert done.returncode != 0
    assert "continued" not in done.stdout


@pytest.mark.parametrize("value", ["fast", "-1", "inf"])
def test_a_setting_that_is_not_valid_is_named(openmpi: Mpi, value: str) -> None:
    settings = {"HOROVOD_CYCLE_TIME": value}
    done = openmpi.run(1, PROGRAMS / "horovod_mistakes.py", env=settings)
    (line,) = errors(done.stdout)
    assert_named(line, "ConfigError", f"HOROVOD_CYCLE_TIME={value}")
