"""One process merges the work of two learners of equal speed, with momentum."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from mpitrain import optim
from mpitrain.core.layout import Layout
from mpitrain.strategy.learners import synchronizer as synchronizer_module
from mpitrain.strategy.learners.ledger import Ledger
from mpitrain.strategy.learners.merging import fragments_of
from mpitrain.strategy.learners.records import pack
from mpitrain.strategy.learners.store import Folder, Register
from mpitrain.strategy.learners.synchronizer import Fragments, Synchronizer, Version, work_file

LAYOUT = Layout.pack([("a", (8, 4), "param"), ("b", (20,), "param")])
DTYPE = np.dtype(np.float64)


class Run:
    """The learners a and b, whose contributions are ones."""

    def __init__(self, folder: Path) -> None:
        self._store, optimizer = Folder(folder), optim.nesterov(1.0, 0.5)
        parts, ledger, self._sent = fragments_of(LAYOUT, 1), Ledger({}, 1000), {"a": 0, "b": 0}
        versions = Fragments(self._store, parts, 2, DTYPE)
        versions.swap(0, Version(1, {}, 0, np.zeros((2, LAYOUT.size))))
        self._ledger = Register(self._store, "ledger", 64)
        for name in self._sent:
            ledger.join(name, name, 0)
        self._ledger.swap(self._ledger.read(), ledger.dump())
        self._synchronizer = Synchronizer(self._store, self._ledger, parts, versions, LAYOUT, optimizer, DTYPE)
        self._synchronizer.begin()

    def send(self, name: str, base: int, value: float = 1.0, **more: object) -> Path:
        """Send a contribution; return the name of its file."""
        self._sent[name] = number = self._sent[name] + 1
        header = {"generation": 1, "number": number, "base": base, "examples": 10 * number} | more
        file = work_file(name, 1, 0, number)
        work = pack(header | {"new_examples": 10, "new_steps": 1}, [np.full(LAYOUT.size, value)])
        self._store.replace(file, work)
        return Path(file)

    def merge(self) -> float:
        """Merge what was sent; return the value of all parameters."""
        for name, sent in self._sent.items():
            state = {"generation": 1, "sent": [sent], "interval_s": 100, "examples_per_s": 5, "beat": sent}
            self._store.replace(f"state.{name}", json.dumps(state).encode())
        assert self._synchronizer.poll(Ledger.parse(self._ledger.read().data), waits=False)
        (value,) = {*LAYOUT.views(self._synchronizer.center)["a"].flat}
        return float(value)


def test_work_of_some_counts_by_their_part_and_last_work_is_averaged(tmp_path: Path) -> None:
    """With momentum 0.5, three versions by one of two equal learners: a half counts; the last one has no momentum."""
    run, expected, momentum = Run(tmp_path), 0.0, 0.0
    for number in (1, 2, 3):  # earlier versions did not write these items
        run.send("a", number, **({"learner": "a", "last": number == 3} if number > 1 else {}))
        momentum = 0.5 * momentum + 0.5
        expected -= 0.5 if number == 3 else 0.5 + 0.5 * momentum
        assert run.merge() == pytest.approx(expected)


def test_work_that_cannot_be_read_yet_does_not_count_for_that_of_others(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.send("a", 1)
    file = tmp_path / run.send("b", 1)
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    assert run.merge() == pytest.approx(-0.5 * 1.5)
    file.write_bytes(whole)
    assert run.merge() == pytest.approx(-0.5 * 1.5 - 0.5 * (1 + 0.5 * 1.5))


@pytest.mark.parametrize("fault", ["not finite", "unreadable"])
def test_others_count_fully_if_the_work_of_a_learner_is_left_out(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(synchronizer_module, "_UNREADABLE_S", 0.0)
    run = Run(tmp_path)
    run.send("a", 1)
    file = tmp_path / run.send("b", 1, value=np.nan)
    if fault == "unreadable":
        file.write_bytes(b"")
    assert run.merge() == pytest.approx(-1.5)
