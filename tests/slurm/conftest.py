"""A Slurm cluster for the tests of this folder."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import pytest

from ..support.launch import ROOT, Mpi, missing
from ..support.slurm.cluster import PROGRAMS, make_cluster
from ..support.slurm.site import Site


@pytest.fixture(scope="session")
def site(openmpi: Mpi, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Three nodes of four CPUs and two GPUs, which are removed after the tests."""
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    if os.geteuid() != 0 or absent:
        missing(f"root, and {', '.join(absent) or 'nothing more'}, to start a Slurm cluster; see .ci/run")
    folder = tmp_path_factory.mktemp("site")
    (folder / "jobs").symlink_to(ROOT / "jobs")
    with make_cluster() as cluster:
        yield Site(cluster, folder)
