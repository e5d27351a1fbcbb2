"""The choice of OpenBLAS's kernels: the user's choice, else the run's, else Haswell's on Zen 4."""

from __future__ import annotations

import pytest

from mpitrain.core.openblas import KERNELS, choose_kernels

ZEN_4 = "vendor_id\t: AuthenticAMD\ncpu family\t: 25\nmodel\t\t: 17\nflags\t\t: fpu avx avx2 fma avx512f avx512dq \n"


@pytest.fixture(autouse=True)
def _own_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not change the record of the choice for this process, which other tests use."""
    monkeypatch.setattr("mpitrain.core.openblas.CHOSEN", {})


@pytest.mark.parametrize(
    ("cpuinfo", "chosen"),
    [
        (ZEN_4, "Haswell"),
        (ZEN_4.replace("AuthenticAMD", "GenuineIntel"), None),
        (ZEN_4.replace(": 25", ": 26"), None),
        (ZEN_4.replace("avx512f ", ""), None),
        ("", None),
    ],
)
def test_kernels(cpuinfo: str, chosen: str | None) -> None:
    environ: dict[str, str] = {}
    choose_kernels(environ, cpuinfo)
    assert environ.get("OPENBLAS_CORETYPE") == chosen
    theirs = {"OPENBLAS_CORETYPE": "Zen"}
    choose_kernels(theirs, cpuinfo)
    assert theirs == {"OPENBLAS_CORETYPE": "Zen"}


@pytest.mark.parametrize(
    ("kernels", "chosen"), [("Sandybridge", "Sandybridge"), ("SkylakeX", "Haswell"), ("unknown", "Haswell")]
)
def test_kernels_of_the_run_are_used_if_the_cpu_can_execute_them(kernels: str, chosen: str) -> None:
    environ = {KERNELS: kernels}
    choose_kernels(environ, ZEN_4)
    assert environ["OPENBLAS_CORETYPE"] == chosen
