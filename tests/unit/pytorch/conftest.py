"""Fixtures of the tests that need torch."""

from __future__ import annotations

from ...torch.conftest import one_thread

__all__ = ["one_thread"]
