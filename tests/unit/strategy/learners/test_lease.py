"""The lease: one learner merges at a time, until it resigns or gives no more signs of life."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from mpitrain.strategy.learners import lease as lease_module
from mpitrain.strategy.learners.lease import Lease
from mpitrain.strategy.learners.ledger import Ledger, change
from mpitrain.strategy.learners.store import Folder, Register


def test_a_holder_that_ends_keeps_the_lease_until_it_resigns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It saves the common model after it has given up its own examples; two learners must not do so at once."""
    store = Folder(tmp_path)
    ledger = Register(store, "ledger", keep=64)
    book = Ledger({}, 100)
    for name in ("a", "b"):
        book.join(name, f"process of {name}", 0)
    assert ledger.swap(ledger.read(), book.dump())

    def newest() -> Ledger:
        return Ledger.parse(ledger.read().data)

    first, second = Lease(store, ledger, "a"), Lease(store, Register(store, "ledger", keep=64), "b")
    first.take(newest())
    store.replace("state.a", b"1")
    change(ledger, lambda value: value.give_up("a", 0))
    assert first.is_held and not second.is_free(newest())
    first.resign()
    assert second.is_free(newest())
    second.take(newest())
    assert second.is_held and not first.is_free(newest())
    monkeypatch.setattr(lease_module, "LEASE_S", 0.01)
    store.replace("state.b", b"2")
    assert not first.is_free(newest())  # a sign of life
    time.sleep(0.02)
    assert first.is_free(newest())
