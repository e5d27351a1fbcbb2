"""The values that ranks read from the environment that a launcher sets."""

from __future__ import annotations

import pytest

from mpitrain.process.launcher_env import attempt_id

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
