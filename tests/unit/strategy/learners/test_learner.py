"""Learners in threads: all examples are trained and merged, whoever dies."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from mpitrain import optim
from mpitrain.errors import ConfigError
from mpitrain.strategy.learners import (
    claims as claims_module,
    learner as learner_module,
    synchronizer as synchronizer_module,
)
from mpitrain.strategy.learners.learner import Group
from mpitrain.strategy.learners.ledger import Ledger
from mpitrain.strategy.learners.records import unpack
from mpitrain.strategy.learners.store import Folder, Register

from ....support.waiting import limit, wait_until
from .process import DTYPE, LAYOUT, TOTAL, Process, give_up_after, state_of

pytestmark = pytest.mark.usefixtures("quick")


@pytest.mark.parametrize("fragments", [1, 3])
def test_one_learner_ends_with_its_own_parameters(tmp_path: Path, fragments: int) -> None:
    process = Process(tmp_path, "a", fragments=fragments).start().end()
    ledger, merged, params = state_of(tmp_path, fragments)
    assert all(process.counts[example] == 1 for example in range(TOTAL)) and max(process.counts) < TOTAL
    assert ledger.is_given_out and not ledger.members["a"].process and not ledger.members["a"].held
    assert merged == process.saved and merged >= TOTAL
    for name in "ab":
        np.testing.assert_allclose(LAYOUT.views(params)[name], merged / 10)


@pytest.mark.parametrize(("units", "fragments"), [((10, 10), 1), ((10, 10, 30), 3)])
def test_several_learners_train_each_example_once(tmp_path: Path, units: tuple[int, ...], fragments: int) -> None:
    processes = [Process(tmp_path, str(n), unit, fragments=fragments).start() for n, unit in enumerate(units)]
    for process in processes:
        process.end()
    counts = sum((process.counts for process in processes), Counter[int]())
    assert all(counts[example] == 1 for example in range(TOTAL))
    ledger, merged, _ = state_of(tmp_path, fragments)
    # Also counts steps beyond the end of a range, while the next one was being claimed.
    assert merged == sum(process.learner.steps_done * process.unit for process in processes) >= TOTAL
    assert max(process.saved for process in processes) == merged and not ledger.living
    for name, member in ledger.members.items():
        assert member.steps == processes[int(name)].learner.kept_steps


def test_two_that_start_at_once_agree(tmp_path: Path) -> None:
    processes = [Process(tmp_path, str(n)) for n in range(4)]
    own = [np.full(LAYOUT.size, float(n)) for n in range(4)]
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda process, params: process.learner.join(params), processes, own))
    common = [process.learner.center for process in processes]
    assert any(np.array_equal(common[0], params) for params in own)
    assert all(np.array_equal(common[0], center) for center in common)
    counts: Counter[int] = Counter()
    for process in processes:
        process.train()
    for process in processes:
        counts += process.end().counts
    assert all(counts[example] == 1 for example in range(TOTAL))


@pytest.mark.parametrize("restarts", [True, False], ids=["restarted", "given up"])
@pytest.mark.parametrize("holds", [True, False], ids=["holder", "other"])
def test_the_examples_of_a_killed_learner_are_trained_again(
    tmp_path: Path, holds: bool, restarts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_up_after(monkeypatch, limit(20) if restarts else 2.0)
    first = Process(tmp_path, "first").start()
    wait_until(lambda: first.learner.holds_lease, "a lease")
    second = Process(tmp_path, "second").start()
    wait_until(lambda: second.learner.generation and second.learner.examples > 200, "some training")
    killed, other = (first, second) if holds else (second, first)
    killed.kill()
    again = [Process(tmp_path, killed.learner._name).start()] if restarts else []
    for process in [other, *again]:
        process.end()
    counts = first.counts + second.counts + sum((process.counts for process in again), Counter[int]())
    ledger, merged, _ = state_of(tmp_path)
    assert set(counts) >= set(range(TOTAL)) and merged >= TOTAL and not ledger.living
    assert {example for example, count in counts.items() if count > 1} <= set(killed.counts)


def test_a_learner_that_is_waited_for_is_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    give_up_after(monkeypatch, limit(5))
    monkeypatch.setattr(claims_module, "_SILENT_S", 0.1)
    first, second = (Process(tmp_path, name).start() for name in ("first", "second"))
    wait_until(lambda: second.learner.generation and second.learner.examples > 200, "some training")
    second.kill()
    first.end()
    notes = [record.args for record in caplog.records if record.levelno == logging.INFO and record.args]
    assert sum("second" in args for args in notes) == 1


def test_an_older_process_of_the_same_learner_ends(tmp_path: Path) -> None:
    first = Process(tmp_path, "a").start()
    wait_until(lambda: first.learner.examples > 200, "some training")
    second = Process(tmp_path, "a").start()
    first.end()
    assert first.learner.is_replaced
    second.end()
    ledger, merged, _ = state_of(tmp_path)
    assert set(first.counts + second.counts) >= set(range(TOTAL)) and merged >= TOTAL and not ledger.living


def test_a_process_that_was_replaced_unnoticed_sends_and_saves_nothing_at_its_end(tmp_path: Path) -> None:
    first = Process(tmp_path, "a").start()
    wait_until(lambda: first.learner.examples > 200, "some training")
    first.kill()  # its thread looks no more
    second = Process(tmp_path, "a")
    second.learner.join(second.params)
    first.learner.exchange(first.params, ends=True)
    assert not first.learner.finish(first._save)
    assert first.learner.is_replaced and not first.saved
    assert json.loads((tmp_path / "state.a").read_bytes())["generation"] == second.learner.generation
    second.train().end()
    assert state_of(tmp_path)[1] >= TOTAL


def test_who_ends_can_save_before_the_lease_of_a_dead_learner_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Process(tmp_path, "first").start()
    wait_until(lambda: first.learner.holds_lease, "a lease")
    second = Process(tmp_path, "second").start()
    wait_until(lambda: second.learner.examples > 200, "some training")
    second.kill()  # ends by what follows
    first.kill()
    second.learner.exchange(second.params, ends=True)
    marks: list[None] = []
    monkeypatch.setattr(learner_module.activity, "mark_progress", lambda: marks.append(None))
    with pytest.raises(TimeoutError):
        second.learner.finish(second._save, patience_s=0.0)
    assert not second.saved
    del marks[:]
    second.learner.finish(second._save)
    assert second.saved and second.learner.center.any()
    assert len(marks) > 5  # the launcher ends ranks that make no progress while they stop


def test_the_others_hear_that_a_learner_has_ended_the_run_early(tmp_path: Path) -> None:
    first, second = (Process(tmp_path, name).start() for name in ("first", "second"))
    wait_until(lambda: first.learner.examples > 200 and second.learner.examples > 200, "some training")
    first.kill()  # ends by what follows
    first.learner.exchange(first.params, ends=True)
    first.learner.ended = "enough"
    first.learner.finish(first._save)
    wait_until(lambda: second.learner.ended == "enough", "the news")
    second.kill()


def test_of_two_processes_of_a_learner_that_start_at_once_one_ends(tmp_path: Path) -> None:
    processes = [Process(tmp_path, "a") for _ in range(2)]
    threads = [threading.Thread(target=process.start) for process in processes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first, second = (process.end() for process in processes)
    ledger, merged, _ = state_of(tmp_path)
    assert [first.learner.is_replaced, second.learner.is_replaced].count(True) == 1
    assert set(first.counts + second.counts) >= set(range(TOTAL)) and merged >= TOTAL and not ledger.living


def test_a_learner_that_was_given_up_continues(tmp_path: Path) -> None:
    class Slow(Folder):
        def delete(self, name: str) -> None:
            if name.startswith("work"):  # as the thread does while it begins a generation
                time.sleep(0.01)
            super().delete(name)

    first = Process(tmp_path, "first", step_s=0.01).start()
    second = Process(tmp_path, "second", store=Slow).start()
    wait_until(lambda: first.learner.holds_lease and second.learner.counts["merged_contributions"] > 1, "some training")
    store, given_up = Folder(tmp_path), (second.learner._newest, "second", second.learner.generation)
    synchronizer_module.give_up(store, Register(store, "ledger", 64), *given_up)
    second.end()
    first.end()
    ledger, merged, _ = state_of(tmp_path)
    assert second.learner.generation > 2 and not second.learner.is_replaced
    assert ledger.members["second"].steps == second.learner.kept_steps < second.learner.steps_done
    assert second.lost_steps == sorted(second.lost_steps) and second.lost_steps[0] == 0
    counts = first.counts + second.counts
    assert set(counts) >= set(range(TOTAL)) and merged >= TOTAL and not ledger.living


def test_parameters_that_are_not_finite_are_replaced(tmp_path: Path) -> None:
    process = Process(tmp_path, "a").start()
    wait_until(lambda: process.learner.examples > 200, "some training")
    process.params[:] = np.nan
    process.end()
    assert np.isfinite(state_of(tmp_path)[2]).all() and np.isfinite(process.params).all()


@pytest.mark.parametrize("fragments", [1, 2])
def test_learners_of_equal_speed_contribute_at_nearly_the_same_step(fragments: int, tmp_path: Path) -> None:
    period, begins = 32, (0, 12)
    processes = [Process(tmp_path, name, unit=1, fragments=fragments, steps=period) for name in "ab"]
    sent: list[list[int]] = [[], []]
    for process in processes:
        process.learner.join(process.params)
    for step in range(period * 10):
        time.sleep(0.01)
        for process, begin, own in zip(processes, begins, sent, strict=True):
            if step < begin:
                continue
            learner = process.learner
            learner.steps_done += 1
            learner.examples += 1
            process.params += 1
            if learner.is_due:
                for fragment, values in learner.exchange(process.params).fragments:
                    fragment.of(process.params)[:] = values
            if learner._contributions._states[0].number > len(own):
                own.append(step)
    for process in processes:
        process.learner.abandon()
    assert sent[1][0] - sent[0][0] == 12
    assert min(abs(sent[1][-1] - step) for step in sent[0]) <= 8, sent


def test_the_last_contribution_of_a_learner_says_so(tmp_path: Path) -> None:
    """Also if one is due when no examples are left: here after each step."""
    headers: dict[str, dict[str, object]] = {}

    class Recorded(Folder):
        def replace(self, name: str, data: bytes) -> None:
            super().replace(name, data)
            if (record := unpack(data, DTYPE, LAYOUT.size)) is not None:
                headers[str(record.header["learner"])] = record.header

    for process in [Process(tmp_path, name, store=Recorded, steps=1).start() for name in "abc"]:
        process.end()
    assert [headers[name]["last"] for name in "abc"] == [True] * 3


def test_giving_up_a_generation_keeps_the_work_of_the_next_one(tmp_path: Path) -> None:
    group = Group(Folder(tmp_path), LAYOUT, DTYPE, optim.sgd(1.0), 1, {}, TOTAL)
    register, ledger = Register(group.store, "ledger", 64), Ledger({}, TOTAL)
    old, new = (ledger.join("a", process, 0) for process in ("first", "second"))
    register.swap(register.read(), ledger.dump())
    names = [synchronizer_module.work_file("a", generation, 0, 1) for generation in (old, new)]
    for name in names:
        group.store.replace(name, b"work")
    version = synchronizer_module.Version(1, {}, 0, np.zeros((2, LAYOUT.size)))
    synchronizer_module.give_up(group.store, register, [version], "a", old)  # seen before the second process joined
    assert [group.store.read(name) for name in names] == [None, b"work"]
    assert Ledger.parse(register.read().data).members["a"].process == "second"


def test_another_learner_is_refused_when_it_joins(tmp_path: Path) -> None:
    Process(tmp_path, "a", facts={"seed": 1}).start().end()
    with pytest.raises(ConfigError, match="seed"):
        Process(tmp_path, "b", facts={"seed": 2}).start()
