"""Learners whose folder cannot be used, is full, has damaged files, or shows changes late; and its size."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from mpitrain.checkpoint.digest import LENGTH
from mpitrain.strategy.learners import synchronizer as synchronizer_module
from mpitrain.strategy.learners.records import pack
from mpitrain.strategy.learners.store import Folder, Register

from ....support.launch import missing
from ....support.waiting import limit, wait_until
from .process import LAYOUT, TOTAL, Process, give_up_after, state_of
from .test_store import Stale

pytestmark = pytest.mark.usefixtures("quick")


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
    assert state_of(tmp_path)[1] == sum(process.learner.steps_done * 10 for process in processes)


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
    ledger, merged, _ = state_of(tmp_path)
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
    steps, merged = [learner.steps_done for learner in learners], state_of(disk, 3)[1]
    wait_until(lambda: all(each.steps_done > n for each, n in zip(learners, steps, strict=True)), "training")
    (disk / "full").unlink()
    counts: Counter[int] = Counter()
    for process in processes:
        counts += process.end().counts
    assert all(counts[example] == 1 for example in range(TOTAL))
    assert merged < state_of(disk, 3)[1] == sum(learner.steps_done * 10 for learner in learners)


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
    _, merged, params = state_of(tmp_path)
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
    ledger, merged, params = state_of(tmp_path)
    assert Damaging.written >= 8 and ledger.is_given_out
    assert 0 < process.learner.steps_done * 10 - merged < TOTAL
    assert ledger.members["a"].steps == merged // 10
    left_out = process.learner.steps_done - merged // 10
    assert process.lost_steps[-1] in (0, left_out)  # 0: perhaps it was left out at the end
    for name in "ab":
        np.testing.assert_allclose(LAYOUT.views(params)[name], merged / 10)


@pytest.mark.parametrize("fragments", [1, 3])
def test_readers_that_see_former_lengths_lose_nothing(fragments: int, tmp_path: Path) -> None:
    processes = [Process(tmp_path, name, fragments=fragments, store=Stale).start() for name in "ab"]
    for process in processes:
        process.end()
    assert state_of(tmp_path, fragments)[1] == sum(process.learner.steps_done * 10 for process in processes)
    assert all(process.learner.counts["discarded_contributions"] == 0 for process in processes)


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
