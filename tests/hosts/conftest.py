"""Three hosts for the tests of this folder."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import pytest

from ..support.hosts.network import make_hosts
from ..support.hosts.training import Hosts
from ..support.launch import Mpi, missing


@pytest.fixture(scope="session")
def hosts(openmpi: Mpi) -> Iterator[Hosts]:
    """Three hosts, which are removed after the tests."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        missing("root and iproute2, to make hosts of network namespaces")
    with make_hosts(openmpi.python, 3) as network:
        yield Hosts(network)
