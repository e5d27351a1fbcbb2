"""Registers the backend ``mpitrain`` with ``torch.distributed``: the entry point that ``import torch`` calls.

This module is outside of the package, and imports nothing but the standard library, because every ``import torch``
imports it. The backend itself is imported by the first ``init_process_group("mpitrain")``.
"""

from __future__ import annotations

import sys
from typing import Any

_NAME = "mpitrain"


def register() -> None:
    """Register the backend and the rendezvous ``mpitrain://``; do nothing if they are registered."""
    try:
        _register()
    except Exception as error:  # ``import torch`` must not fail because of this package
        print(f"mpitrain: the backend {_NAME!r} of torch.distributed is not available: {error}", file=sys.stderr)


def _register() -> None:
    import torch.distributed as dist

    if not dist.is_available() or _NAME in dist.Backend.backend_list:
        return
    dist.register_rendezvous_handler(_NAME, _rendezvous)  # type: ignore[attr-defined]
    dist.Backend.register_backend(_NAME, _create, extended_api=True, devices=["cpu", "cuda"])


def _create(options: Any, backend_options: Any = None) -> Any:
    from mpitrain.backend.process_group import create

    return create(options, backend_options)


def _rendezvous(url: str, **options: Any) -> Any:
    from mpitrain.backend.rendezvous import rendezvous

    return rendezvous(url, **options)
