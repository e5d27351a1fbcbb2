"""Learners in threads: all examples are trained and merged, whoever dies."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from mpitrain import optim
from mpitrain.checkpoint.digest import LENGTH
from mpitrain.core.layout import Layout
from mpitrain.errors import ConfigError
from mpitrain.strategy.learners import (
    claims as claims_module,
    learner as learner_module,
    lease as lease_module,
    signs as signs_module,
    synchronizer as synchronizer_module,
)
from mpitrain.strategy.learners.learner import Group, Learner
from mpitrain.strategy.learners.ledger import Ledger, Ranges
from mpitrain.strategy.learners.records import pack, unpack
from mpitrain.strategy.learners.store import Folder, Register
from mpitrain.strategy.learners.synchronizer import Fragments

from ....support.launch import missing
from ....support.waiting import limit, wait_until

LAYOUT = Layout.pack([("a", (8, 4), "param"), ("b", (20,), "param"), ("mean", (3,), "state")])
DTYPE = np.dtype(np.float64)
TOTAL = 4000


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learner_module, "POLL_S", 0.01)
    monkeypatch.setattr(learner_module, "_STATE_S", 0.02)
    monkeypatch.setattr(claims_module, "_MEASURE_S", 0.02)
    monkeypatch.setattr(lease_module, "LEASE_S", 1.0)
    monkeypatch.setattr(signs_module, "_LOOK_S", 0.1)
    give_up_after(monkeypatch, limit(20))


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


def _state(folder: Path, fragments: int = 1) -> tuple[Ledger, int, np.ndarray]:
    """Return the ledger, the number of merged examples, and the common parameters."""
    store = Folder(folder)
    parts = learner_module.fragments_of(LAYOUT, fragments)
    versions = [Fragments(store, parts, 1, DTYPE).read(index) for index in range(len(parts))]
    assert all(version is not None for version in versions)
    params = np.concatenate([version.vectors[0] for version in versions if version is not None])
    ledger = Ledger.parse(Register(store, "ledger", 64).read().data)
    return ledger, min(version.examples for version in versions if version is not None), params


@pytest.mark.parametrize("fragments", [1, 3])
def test_one_learner_ends_with_its_own_parameters(tmp_path: Path, fragments: int) -> None:
    process = Process(tmp_path, "a", fragments=fragments).start().end()
    ledger, merged, params = _state(tmp_path, fragments)
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
    ledger, merged, _ = _state(tmp_path, fragments)
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
    ledger, merged, _ = _state(tmp_path)
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
    ledger, merged, _ = _state(tmp_path)
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
    assert _state(tmp_path)[1] >= TOTAL


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
    ledger, merged, _ = _state(tmp_path)
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
    ledger, merged, _ = _state(tmp_path)
    assert second.learner.generation > 2 and not second.learner.is_replaced
    assert ledger.members["second"].steps == second.learner.kept_steps < second.learner.steps_done
    assert second.lost_steps == sorted(second.lost_steps) and second.lost_steps[0] == 0
    counts = first.counts + second.counts
    assert set(counts) >= set(range(TOTAL)) and merged >= TOTAL and not ledger.living


class Unreliable(Folder):
    """A folder that this process cannot use while ``fails`` is True."""

    fails = False

    def read(self, name: str) -> bytes | None:
        self._check()
        return super().read(name)

    def _write(self, name: str, data: bytes, durably: bool) -> str:
        self._check()
        return super()._write(name, data, durably)

    def _check(self) -> None:
        if self.fails:
            raise OSError(28, "No space left on device")


def test_learners_train_on_while_the_folder_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For longer than a learner without news keeps its examples: nobody is given up, because nobody can give news."""
    give_up_after(monkeypatch, limit(3))
    processes = [Process(tmp_path, str(n), store=Unreliable).start() for n in range(2)]
    first, second = (process.learner for process in processes)
    wait_until(lambda: first.examples > 200 and second.examples > 200, "some training")
    for learner in (first, second):
        learner._store.fails = True  # type: ignore[attr-defined]
    began, steps = time.monotonic(), (first.steps_done, second.steps_done)
    wait_until(lambda: time.monotonic() - began > limit(3.2), "the time after which a learner is given up")
    assert first.steps_done > steps[0] and second.steps_done > steps[1]
    for learner in (first, second) if first.holds_lease else (second, first):
        learner._store.fails, beat = False, learner._beat  # type: ignore[attr-defined]
        wait_until(
            lambda learner=learner, beat=beat: learner._beat > beat + 3, "news of one, while it has none of others"
        )
    counts: Counter[int] = Counter()
    for process in processes:
        counts += process.end().counts
    assert all(counts[example] == 1 for example in range(TOTAL))
    assert _state(tmp_path)[1] == sum(process.learner.steps_done * 10 for process in processes)


def test_a_foreign_file_in_place_of_the_newest_ledger_is_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    processes = [Process(tmp_path, str(n)).start() for n in range(2)]
    wait_until(lambda: all(process.learner.examples > 200 for process in processes), "some training")
    store = Folder(tmp_path)
    while not store.create(f"ledger.{(number := Register(store, 'ledger').read().number + 1)}", b"hello"):
        pass
    counts = sum((process.end().counts for process in processes), Counter[int]())
    assert all(counts[example] == 1 for example in range(TOTAL))
    ledger, merged, _ = _state(tmp_path)
    assert merged >= TOTAL and ledger.is_given_out and not ledger.living
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert 1 <= len(warnings) <= 2 and all(f"ledger.{number}" in record.getMessage() for record in warnings)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small file system of its own."""
    if os.geteuid() != 0:
        missing("root, to mount a disk")
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def _fill(path: Path) -> None:
    """Fill the rest of a file system with a file."""
    with path.open("ab", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


def test_learners_train_on_while_the_disk_is_full(disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    processes = [Process(disk, str(n), fragments=3).start() for n in range(2)]
    learners = [process.learner for process in processes]
    wait_until(lambda: all(learner.examples > 200 for learner in learners), "some training")

    def are_cut_off() -> bool:
        _fill(disk / "full")
        since = [learner._trouble.since for learner in learners]
        return all(each is not None and time.monotonic() - each > 0.3 for each in since)

    wait_until(are_cut_off, "a full disk")
    warned = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warned) == 2
    steps, merged = [learner.steps_done for learner in learners], _state(disk, 3)[1]
    wait_until(lambda: all(each.steps_done > n for each, n in zip(learners, steps, strict=True)), "training")
    (disk / "full").unlink()
    counts: Counter[int] = Counter()
    for process in processes:
        counts += process.end().counts
    assert all(counts[example] == 1 for example in range(TOTAL))
    assert merged < _state(disk, 3)[1] == sum(learner.steps_done * 10 for learner in learners)


def test_a_version_that_cannot_be_written_is_not_merged_again_and_again(tmp_path: Path) -> None:
    """As on a disk that has space for small files only."""

    class Full(Folder):
        failures = 0

        def create(self, name: str, data: bytes) -> bool:
            if name == "fragment-0.4" and Full.failures < 9:
                Full.failures += 1
                raise OSError(28, "No space left on device")
            return super().create(name, data)

    Process(tmp_path, "a", store=Full).start().end()
    _, merged, params = _state(tmp_path)
    assert Full.failures == 9 and merged >= TOTAL
    np.testing.assert_allclose(LAYOUT.views(params)["a"], merged / 10)


def _truncated(data: bytes) -> bytes:
    return data[:-20]


def _foreign(data: bytes) -> bytes:
    return b"x" * len(data)


def _older(data: bytes) -> bytes:
    header, values = json.loads(data[LENGTH + 1 :].split(b"\n")[0]), np.zeros(LAYOUT.size)
    return pack(header | {"number": 0}, [values])


def _of_another(data: bytes) -> bytes:
    header, values = json.loads(data[LENGTH + 1 :].split(b"\n")[0]), np.ones(LAYOUT.size)
    return pack(header | {"learner": "b"}, [values])


def _version(data: bytes) -> bytes:
    return pack({"merged": {"a": [1, 2]}, "examples": 30}, [np.ones(LAYOUT.size)])


def _not_finite(data: bytes) -> bytes:
    header = json.loads(data[LENGTH + 1 :].split(b"\n")[0])
    return pack(header, [np.full(LAYOUT.size, np.nan)])


def _too_large(data: bytes) -> bytes:
    header = json.loads(data[LENGTH + 1 :].split(b"\n")[0])
    return pack(header, [np.full(LAYOUT.size, 1e6)])


@pytest.mark.parametrize("damage", [_truncated, _foreign, _older, _of_another, _version, _not_finite, _too_large])
def test_work_that_is_damaged_is_left_out(
    tmp_path: Path, damage: Callable[[bytes], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(synchronizer_module, "_UNREADABLE_S", 0.2)

    class Damaging(Folder):
        written = 0

        def replace(self, name: str, data: bytes) -> None:
            if name.startswith("work"):
                Damaging.written += 1
                data = damage(data) if Damaging.written == 8 else data
            super().replace(name, data)

    process = Process(tmp_path, "a", store=Damaging).start().end()
    ledger, merged, params = _state(tmp_path)
    assert Damaging.written >= 8 and ledger.is_given_out
    assert 0 < process.learner.steps_done * 10 - merged < TOTAL
    assert ledger.members["a"].steps == merged // 10
    left_out = process.learner.steps_done - merged // 10
    assert process.lost_steps[-1] in (0, left_out)  # 0: perhaps it was left out at the end
    for name in "ab":
        np.testing.assert_allclose(LAYOUT.views(params)[name], merged / 10)


def test_parameters_that_are_not_finite_are_replaced(tmp_path: Path) -> None:
    process = Process(tmp_path, "a").start()
    wait_until(lambda: process.learner.examples > 200, "some training")
    process.params[:] = np.nan
    process.end()
    assert np.isfinite(_state(tmp_path)[2]).all() and np.isfinite(process.params).all()


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


class Stale(Folder):
    """As over SFTP for 20 s: a new content is seen with the length that the name had before."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._lengths: dict[str, int] = {}

    def read(self, name: str) -> bytes | None:
        data = super().read(name)
        if not data:
            return data
        return data[: self._lengths.setdefault(name, len(data))]


@pytest.mark.parametrize("fragments", [1, 3])
def test_readers_that_see_former_lengths_lose_and_delay_nothing(fragments: int, tmp_path: Path) -> None:
    processes = [Process(tmp_path, name, fragments=fragments, store=Stale).start() for name in "ab"]
    for process in processes:
        process.end()
    assert _state(tmp_path, fragments)[1] == sum(process.learner.steps_done * 10 for process in processes)
    assert all(process.learner.counts["discarded_contributions"] == 0 for process in processes)
    assert all(process.learner.counts["merged_contributions"] > 1 for process in processes)


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


@pytest.mark.parametrize("name", ["ledger", "fragment-0"])
def test_a_run_whose_newest_files_are_empty_is_not_begun_again(name: str, tmp_path: Path) -> None:
    Process(tmp_path, "a").start().end()
    files = sorted(tmp_path.glob(f"{name}.*[0-9]"), key=lambda path: int(path.suffix[1:]))
    for file in files[-1:] if name != "ledger" else files:
        file.write_bytes(b"")
    with pytest.raises(OSError, match="damaged"):
        Process(tmp_path, "b").start()
    assert {path.name for path in tmp_path.glob(f"{name}.*[0-9]")} == {path.name for path in files}


def test_the_folder_stays_small(tmp_path: Path) -> None:
    processes = [Process(tmp_path, str(n), fragments=2).start() for n in range(2)]
    for process in processes:
        process.end()
    counts = Counter(path.name.split(".")[0] for path in tmp_path.iterdir() if path.stat().st_size)
    assert counts == {"ledger": counts["ledger"], "fragment-0": 3, "fragment-1": 3, "state": 2, "model": 1}
    assert counts["ledger"] <= 65
