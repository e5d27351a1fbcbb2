"""Tests of PyTorch modules; they need the extra ``torch``."""

from __future__ import annotations

import importlib.util

import pytest

from ..support.launch import STRICT

# Where nothing may be missing, collecting them fails without torch.
collect_ignore_glob = [] if STRICT or importlib.util.find_spec("torch") else ["test_*.py"]


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Let torch use one thread in this process: its threads wait for each other where other tests use the cores."""
    import torch

    torch.set_num_threads(1)
