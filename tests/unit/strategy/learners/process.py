"""A process of a learner, as threads of the test."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mpitrain import optim
from mpitrain.core.layout import Layout
from mpitrain.strategy.learners import (
    claims as claims_module,
    learner as learner_module,
    synchronizer as synchronizer_module,
)
from mpitrain.strategy.learners.learner import Group, Learner
from mpitrain.strategy.learners.ledger import Ledger, Ranges
from mpitrain.strategy.learners.store import Folder, Register
from mpitrain.strategy.learners.synchronizer import Fragments

from ....support.waiting import limit

LAYOUT = Layout.pack([("a", (8, 4), "param"), ("b", (20,), "param"), ("mean", (3,), "state")])
DTYPE = np.dtype(np.float64)
TOTAL = 4000


def give_up_after(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    for module in (claims_module, learner_module, synchronizer_module):
        monkeypatch.setattr(module, "LOST_S", seconds)


class Process:
    """A process of a learner, whose step adds 1 to every parameter; its thread is the training thread."""

    def __init__(
        self,
        folder: Path,
        name: str,
        unit: int = 10,
        step_s: float = 0.001,
        fragments: int = 1,
        facts: dict[str, object] | None = None,
        store: Callable[[Path], Folder] = Folder,
        steps: int = 8,
    ) -> None:
        group = Group(store(folder), LAYOUT, DTYPE, optim.sgd(1.0), fragments, facts or {}, TOTAL)
        self.learner = Learner(group, name, f"process {id(self)}", steps, unit)
        self.unit, self.step_s, self.counts = unit, step_s, Counter[int]()
        self.saved, self.lost_steps = 0, list[int]()
        self.params = np.zeros(LAYOUT.size)
        self._killed = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.error: BaseException | None = None

    def start(self) -> Process:
        self.learner.join(self.params)
        return self.train()

    def train(self) -> Process:
        self._thread.start()
        return self

    def kill(self) -> None:
        """End without any last word; the learner's thread, too."""
        self._killed.set()
        self.learner._closing.set()
        self._thread.join()
        self.learner._thread.join()

    def end(self) -> Process:
        """Wait for the regular end."""
        self._thread.join(limit(60))
        assert not self._thread.is_alive() and self.error is None, self.error
        return self

    def _run(self) -> None:
        try:
            self._train()
        except BaseException as error:
            self.error = error

    def _train(self) -> None:
        learner, ranges, cursor = self.learner, Ranges(), 0
        self.params[:] = learner.center
        while True:
            if learner.is_due or ranges.is_at_end(cursor) or ranges.must_wait(cursor):
                news = learner.exchange(self.params)
                for fragment, values in news.fragments:
                    fragment.of(self.params)[:] = values
                ranges.update(news.ranges, news.is_reset, news.left)
            if ranges.must_wait(cursor):
                time.sleep(self.step_s)
                continue
            if ranges.take_next(cursor):
                cursor = ranges.current[0]
            elif ranges.has_ended(cursor) or learner.is_replaced:
                break
            if self._killed.is_set():
                return
            time.sleep(self.step_s)
            if cursor < ranges.current[1]:
                self.counts.update(range(cursor, cursor + self.unit))
            cursor += self.unit
            self.params += 1
            learner.steps_done += 1
            learner.examples = ranges.trained(cursor)
            self.lost_steps.append(learner.steps_done - learner.kept_steps)
        learner.exchange(self.params, ends=True)
        learner.finish(self._save)

    def _save(self, params: np.ndarray, examples: int) -> None:
        self.saved = examples


def state_of(folder: Path, fragments: int = 1) -> tuple[Ledger, int, np.ndarray]:
    """Return the ledger, the number of merged examples, and the common parameters."""
    store = Folder(folder)
    parts = learner_module.fragments_of(LAYOUT, fragments)
    versions = [Fragments(store, parts, 1, DTYPE).read(index) for index in range(len(parts))]
    assert all(version is not None for version in versions)
    params = np.concatenate([version.vectors[0] for version in versions if version is not None])
    ledger = Ledger.parse(Register(store, "ledger", 64).read().data)
    return ledger, min(version.examples for version in versions if version is not None), params
