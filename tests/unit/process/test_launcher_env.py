"""The values that ranks read from the environment that a launcher sets."""

from __future__ import annotations

import os
import sys

import pytest

from mpitrain.process.launcher_env import attempt_id, import_alike, leave_job, leave_outer_run, leave_run, mark_rank

SLURM = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}


@pytest.mark.parametrize("more", [{}, {"PMIX_NAMESPACE": "slurm.pmix.7.0"}], ids=["pmi2", "pmix"])
def test_a_requeued_job_is_another_attempt(more: dict[str, str]) -> None:
    first = attempt_id({**SLURM, **more})
    second = attempt_id({**SLURM, **more, "SLURM_RESTART_COUNT": "1"})
    assert first and second and first != second


def test_the_attempt_of_mpitrain_run_comes_first() -> None:
    assert attempt_id({**SLURM, "MPITRAIN_ATTEMPT": "abc/1", "PMIX_NAMESPACE": "prterun-a-1@1"}) == "abc/1"
    assert attempt_id({"PMIX_NAMESPACE": "prterun-a-1@1"}) == "prterun-a-1@1"
    assert attempt_id({}) == ""


def test_what_the_user_and_the_allocation_have_set_stays() -> None:
    kept = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "OMPI_MCA_btl": "self", "MASTER_ADDR": "h", "A": "1"}
    of_rank = {"OMPI_COMM_WORLD_RANK": "1", "PMIX_NAMESPACE": "x", "OMPI_MCA_num_procs": "2", "SLURM_STEP_ID": "0"}
    of_run = {"MPITRAIN_RUN_DIR": "r", "MPITRAIN_ATTEMPT": "a", "RANK": "1", "MPITRAIN_SET_FOR_PROGRAM": "RANK"}
    environ = {**kept, **of_rank, **of_run}
    leave_run(environ)
    assert environ == kept
    leave_run(environ)
    assert environ == kept


def test_a_submitted_job_gets_nothing_of_the_job_that_submits_it() -> None:
    kept = {"SLURM_CONF": "/etc/s", "SBATCH_ACCOUNT": "a", "OMPI_MCA_btl": "self"}
    environ = {**kept, "SLURM_MEM_PER_NODE": "1", "SLURM_JOB_ID": "7", "MPITRAIN_END_TIME": "1"}
    leave_job(environ)
    assert environ == kept


@pytest.mark.parametrize(
    ("variables", "are_alike"),
    [
        ({"OMPI_COMM_WORLD_RANK": "1", "PMIX_RANK": "1", "PMI_RANK": "1", "OMPI_MCA_btl": "self", "PWD": "/"}, True),
        ({"MPITRAIN_RUN_DIR": "r", "MPITRAIN_BLAS_KERNELS": "haswell"}, True),
        ({"MPITRAIN_BLAS_KERNELS": "Zen"}, False),
        ({"OPENBLAS_NUM_THREADS": "1"}, False),
        ({"LD_LIBRARY_PATH": os.path.join(sys.prefix, "lib")}, True),
        ({"LD_LIBRARY_PATH": f"{os.path.join(sys.prefix, 'lib')}:/opt/lib"}, False),
        ({"MY_VALUE": "1"}, False),
    ],
)
def test_only_variables_of_launchers_make_no_difference_to_imports(variables: dict[str, str], are_alike: bool) -> None:
    started_with = {"A": "1"}
    assert import_alike(started_with, {**started_with, **variables}, "Haswell") == are_alike
    assert not import_alike(started_with, variables, "Haswell")


@pytest.mark.parametrize(
    ("is_rank", "step", "left"),
    [
        (True, "0", ["OMPI_COMM_WORLD_RANK", "RANK", "MPITRAIN_RUN_DIR"]),
        (False, "0", []),
        (False, "1", ["OMPI_COMM_WORLD_RANK"]),  # another launcher has started this process in the rank
    ],
)
def test_a_process_in_a_rank_leaves_its_run(is_rank: bool, step: str, left: list[str]) -> None:
    values = ["OMPI_COMM_WORLD_RANK", "RANK", "MPITRAIN_RUN_DIR"]
    environ = {**dict.fromkeys(values, "1"), "MPITRAIN_SET_FOR_PROGRAM": "RANK", "SLURM_STEP_ID": "0"}
    mark_rank(environ)
    if not is_rank:
        environ["MPITRAIN_RANK"] = environ["MPITRAIN_RANK"].replace(f"[{os.getpid()},", "[1,")
    environ["SLURM_STEP_ID"] = step
    leave_outer_run(environ)
    assert [name for name in values if name in environ] == left
