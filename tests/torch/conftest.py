"""Tests of PyTorch modules; they need the extra ``torch``."""

from __future__ import annotations

import importlib.util

from ..support.launch import STRICT

# Where nothing may be missing, collecting them fails without torch.
collect_ignore_glob = [] if STRICT or importlib.util.find_spec("torch") else ["test_*.py"]
