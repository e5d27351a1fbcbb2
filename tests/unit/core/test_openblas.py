"""OpenBLAS's kernels are chosen on Zen 4 alone, and never against the user."""

from __future__ import annotations

import pytest

from mpitrain.core.openblas import choose_kernels

ZEN_4 = "vendor_id\t: AuthenticAMD\ncpu family\t: 25\nmodel\t\t: 17\nflags\t\t: fpu avx2 avx512f avx512dq\n"


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
