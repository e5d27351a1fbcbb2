"""Horovod's API on several hosts."""

from __future__ import annotations

import re

from ..support.hosts.training import Hosts
from ..support.launch import PROGRAMS
from .test_backend_hosts import _torch, on_hosts

__all__ = ["_torch"]  # a fixture


def test_operations_on_hosts_with_unequal_numbers_of_ranks(hosts: Hosts) -> None:
    status, printed, errors = on_hosts(hosts, [2, 1], str(PROGRAMS / "horovod_operations.py"))
    assert status == 0, errors
    assert printed[0]["checks"] > 200


def test_a_rank_of_another_host_that_has_ended_is_named(hosts: Hosts) -> None:
    words = [str(PROGRAMS / "horovod_mistakes.py"), "other_shape", "exiting_rank"]
    _, printed, errors = on_hosts(hosts, [1, 1], *words)
    assert {line["rank"] for line in printed if line["mistake"] == "other_shape"} == {0, 1}, errors
    (line,) = [line for line in printed if line["mistake"] == "exiting_rank"]
    assert line["error"] == "HorovodInternalError" and re.search("rank 1 shut down or ended", str(line["text"]))
