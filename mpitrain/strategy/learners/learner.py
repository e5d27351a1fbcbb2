"""A process of a learner: its thread does everything that touches the store, while the ranks train.

The thread writes contributions (``contributions``), reads new versions of the common parameters, claims examples
(``ledger``), gives signs of life, and merges if this process has the lease (``synchronizer``). If the store cannot be
reached, training goes on, and the thread tries again.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from ...core import activity
from ...core.layout import Array, Layout
from ...optim import Optimizer
from .claims import Claims
from .contributions import Contributions
from .facts import check_facts
from .lease import LEASE_S, Lease
from .ledger import Ledger, Left, Member, Range, change, ledger_in
from .merging import Fragment, fragments_of
from .records import pack
from .signs import read_state
from .store import Store
from .synchronizer import LOST_S, Fragments, Merged, Synchronizer, Version, delete_work, merged_work, work_file
from .trouble import Trouble

POLL_S, _SHORTEST_S = 0.2, 0.02  # seconds between two looks at the store: at most, and at least
_LOOKS, _REST = 8, 4  # looks between two contributions, if there are other learners; and pause after one, in its times
_MORE = 4  # times as many looks while a contribution waits to be merged
_STATE_S = 1.0  # seconds between two signs of life
_STATE_BYTES = 1024  # the file of a learner's state has a multiple of them; see ``Store.replace``
_WAIT_S = 2.0  # seconds for which a learner waits for its next range before it trains examples that it has not claimed
_LAST_S = 2.0  # seconds for which the last contributions of all learners are merged together
_log = logging.getLogger(__name__)


class Group(NamedTuple):
    """What a run of learners exchanges.

    Attributes:
        store: Where they meet.
        layout, dtype: Of the flat vectors.
        optimizer: The outer optimizer.
        fragments: Number of parts in which the parameters are exchanged.
        facts: What all learners must have in common, by name.
        total: Number of examples to train, if this is the first learner.
    """

    store: Store
    layout: Layout
    dtype: np.dtype[Any]
    optimizer: Optimizer
    fragments: int
    facts: Mapping[str, Any]
    total: int


class News(NamedTuple):
    """What has changed for a learner.

    Attributes:
        fragments: New values of this learner's parameters, with their ranges of the flat vector.
        ranges: The examples to train after those that it has.
        is_reset: Whether ``ranges`` replace those that it has.
        left: Whether other examples are left after those.
        trained: Number of examples of the run that were trained, by all learners, as far as this one knows.
    """

    fragments: list[tuple[Fragment, Array]]
    ranges: list[Range]
    is_reset: bool
    left: Left
    trained: int


class Learner:
    """A process of a learner; one rank has it. Its methods are local; they do not wait for the store, except ``join``
    and ``finish``.

    Args:
        name: The learner's name, unique in the run.
        process: Identifies the process.
        steps: Number of steps between two contributions to the same fragment.
        unit: Number of examples of a step.

    Attributes:
        examples: Number of examples of its ranges that it has trained; set by the caller.
        steps_done: Number of steps that it has trained; set by the caller.
        total, unit: Number of examples of the run, and of one of its steps.
        is_complete: Whether the common parameters contain all examples, at the end.
        is_replaced: Whether another process trains this learner now, so that this one must end.
        ended: Why the run ends early, so that this process must end; empty if it does not. ``finish`` tells the others
            what the caller has set.
    """

    def __init__(self, group: Group, name: str, process: str, steps: int, unit: int) -> None:
        self._store, self._layout, self._dtype = group.store, group.layout, group.dtype
        self._group, self._name, self._process, self._unit = group, name, process, unit
        self._fragments = fragments_of(group.layout, group.fragments)
        self._pace = max(1, steps // len(self._fragments))
        self._ledger = ledger_in(group.store)
        first = 4 * self._pace * len(self._fragments) * unit
        self._claims = Claims(group.store, self._ledger, name, unit, first)
        self._versions = Fragments(group.store, self._fragments, 1 + len(group.optimizer.slots), group.dtype)
        self._synchronizer = Synchronizer(
            group.store, self._ledger, self._fragments, self._versions, group.layout, group.optimizer, group.dtype
        )
        self._newest: list[Version] = []  # as read by the thread
        self._contributions: Contributions
        self._written = [0] * len(self._fragments)  # the numbers of the last contributions that are in the store
        self._outgoing: deque[tuple[int, dict[str, Any], Array]] = deque()  # contributions to be written
        self._turn, self._last_sent = 0, 0  # the fragment to send next, and the step of the last contribution
        self._unmerged = 0  # the number of a contribution to the first fragment
        self._sent_s = deque[float](maxlen=2 * len(self._fragments) + 1)  # when contributions were made
        self._news: dict[int, Version] = {}
        self._last_left = Left.SOME
        self.is_replaced = self.is_complete = self._is_alone = False
        self.generation = self.examples = self.steps_done = self.total = 0
        self.ended = ""
        self._entered = 0  # a new generation, which the training thread has not begun yet
        self._steps_before = 0  # this learner's steps that were merged before it
        self._kept_steps = self._began_steps = 0  # see ``kept_steps``
        self._lock, self._closing, self._wake = threading.Lock(), threading.Event(), threading.Event()
        self._waits_since = math.inf  # since when this learner has no range
        self._error: BaseException | None = None
        self._beat, self._stated_s, self._looked_s = 0, 0.0, 0.0
        self._lease = Lease(group.store, self._ledger, name)
        self._trouble = Trouble()
        self._thread = threading.Thread(target=self._run, name="learner", daemon=True)

    # The methods of the training thread.

    def join(self, params: Array) -> None:
        """Take part in the run, or begin it with these parameters; ``center`` and the first range are known then.

        Raises:
            ConfigError: The run is one of another model, data set or version.
            OSError: The store cannot be used.
        """
        begun = Ledger(dict(self._group.facts), self._group.total, self._unit).dump()
        if not (first := self._ledger.read()).number:
            self._ledger.swap(first, begun)
        ledger = Ledger.parse(self._ledger.read().data)
        check_facts(Ledger.parse(begun).facts, ledger.facts, self._layout, self._store)
        for index, fragment in enumerate(self._fragments):
            if self._versions.read(index) is None:
                vectors = np.zeros((1 + len(self._group.optimizer.slots), fragment.hi - fragment.lo), self._dtype)
                vectors[0] = fragment.of(params)
                self._versions.swap(index, Version(1, {}, 0, vectors))
        self._synchronizer.prepare()
        self._synchronizer.begin()
        self._newest = list(self._synchronizer.newest)
        self.total, self.unit = ledger.total, ledger.unit
        self.generation, self._kept_steps = self._enter(), self._steps_before
        self._contributions = Contributions(self._layout, self._fragments, self._newest, 0)
        self._write_state()
        self._claims.claim(self.generation, self._newest)
        self._thread.start()

    @property
    def center(self) -> Array:
        """The common parameters, as last received, shape (layout.size,)."""
        return self._contributions.center

    def all_fragments(self) -> list[tuple[Fragment, Array]]:
        """Return the common parameters as ``News.fragments``."""
        return [(fragment, fragment.of(self.center)) for fragment in self._fragments]

    @property
    def is_due(self) -> bool:
        """Whether ``exchange`` has something to do, such as to raise an exception that was raised in the thread."""
        has_news = self._news or self._claims.has_news or self._entered or self._claims.left is not self._last_left
        return bool(has_news) or self._may_send() or self._error is not None

    def exchange(self, params: Array, ends: bool = False) -> News:
        """Take over what other learners have contributed, and contribute what is due.

        Args:
            params: Shape (layout.size,): this learner's parameters, which are not changed.
            ends: Whether to contribute everything, because the learner ends.

        Returns:
            The parameters to continue with.
        """
        if self._error is not None:
            raise self._error
        values: dict[int, Array] = {}
        with self._lock:
            received, self._news = self._news, {}
            if is_reset := self._entered > 0:
                self._reset()
                received = {}
                values = {index: fragment.of(self.center) for index, fragment in enumerate(self._fragments)}
        ranges, left = self._claims.take()  # later, because those of the former generation are dropped before a reset
        self._last_left = left
        has_examples = bool(ranges) or self.examples < self._claims.count
        if left is Left.SOME and self._waits_for_range(has_examples):
            left = Left.UNKNOWN
        for index, version in received.items():
            theta, mine = self._fragments[index].of(params), version.of(self._name, self.generation)
            values[index] = self._contributions.receive(index, version, mine, theta)
            if index == 0:
                self._align(mine)
        # Without examples, this may be the last work, which ``ends`` then says.
        sends = self._may_send() and (has_examples or left is Left.SOME)
        for index in range(len(self._fragments)) if ends else [self._turn] if sends else []:
            self._send(index, values.get(index, self._fragments[index].of(params)), ends)
        own = [(version.examples, version.of(self._name, self.generation).examples) for version in self._newest]
        trained = self.examples + max(0, min(of_all - of_own for of_all, of_own in own))
        return News([(self._fragments[i], each) for i, each in values.items()], ranges, is_reset, left, trained)

    @property
    def holds_lease(self) -> bool:
        """Whether this process merges."""
        return self._lease.is_held

    @property
    def merged(self) -> int:
        """The number of examples that the newest common parameters contain."""
        return min(version.examples for version in self._newest)

    @property
    def received(self) -> int:
        """The number of examples that ``center`` contains."""
        return self._contributions.examples

    @property
    def speeds(self) -> list[float]:
        """The examples/s of each learner that has a process, if this one merges."""
        return self._synchronizer.speeds

    @property
    def kept_steps(self) -> int:
        """The number of this learner's steps, over all generations, whose work is merged or may still be."""
        return self._kept_steps + self.steps_done - self._began_steps - self._contributions.lost_steps

    @property
    def counts(self) -> dict[str, float]:
        """What has become of this generation's contributions, and how many versions the last one lagged behind."""
        mine = [version.of(self._name, self.generation) for version in self._newest]
        discarded = sum(each.discarded for each in mine)
        return {
            "merged_contributions": sum(each.number for each in mine) - discarded,
            "discarded_contributions": discarded,
            "lag_versions": max(each.lag for each in mine),
        }

    def finish(self, save: Callable[[Array, int], None], patience_s: float = LOST_S) -> bool:
        """End: bring the last contributions to the store, and merge if no other learner does; ``center`` is the newest
        version afterwards.

        Args:
            save: Called with the common parameters and the number of examples that they contain, if this process
                merges.
            patience_s: For how long to try again if the store cannot be used, and to wait for a sign of life of the
                learner that merges, a little longer.

        Returns:
            Whether this process has merged last; ``is_complete`` is then known. False if ``is_replaced``.

        Raises:
            OSError: The store cannot be used, or the learner that merges gives no sign of life yet; call it again to
                try again.
        """
        self._closing.set()
        self._thread.join()
        until = time.monotonic() + patience_s
        while not self.is_replaced:
            try:
                is_last = self._finish(save, until)
                self._read_versions()
                self._contributions = Contributions(self._layout, self._fragments, self._newest, self.steps_done)
                return is_last
            except OSError as error:
                if time.monotonic() >= until:
                    raise
                self._trouble.report(error)
                _wait(_STATE_S)
        return False

    def abandon(self) -> None:
        """Give no more signs of life, after an error; no effect after ``finish``."""
        self._closing.set()

    def _finish(self, save: Callable[[Array, int], None], until: float) -> bool:
        self._look()
        if self.is_replaced:
            return False
        change(self._ledger, lambda ledger: setattr(ledger, "ended", ledger.ended or self.ended))
        self._write_work()
        self._write_state(ended=True)
        while self._must_merge(until):
            last = time.monotonic() + _LAST_S
            while self._others(ended=False) and time.monotonic() < last:
                _wait(POLL_S)
            while self._synchronizer.poll(Ledger.parse(self._ledger.read().data), waits=False):
                pass
            self._newest = list(self._synchronizer.newest)
            save(self._synchronizer.center, self.merged)
            self._lease.resign()
            # A learner that ends now has sent its last work before it looks whether another one merges. So either it
            # sees that this one has resigned, or this one sees that it has ended.
            if not self._others(ended=True):
                ledger = Ledger.parse(self._ledger.read().data)
                self.is_complete = ledger.is_given_out
                return not ledger.living
            _wait(POLL_S)
        return False

    def _others(self, ended: bool) -> bool:
        """Return whether there are learners with a process that have said that they end, or that have not."""
        members = Ledger.parse(self._ledger.read().data).members
        return any(
            bool(read_state(self._store, name).get("ended")) is ended
            for name, member in members.items()
            if member.process
        )

    def _must_merge(self, until: float) -> bool:
        """Return whether this process has the lease, or can take it; wait for a sign of life of another that has it.

        Raises:
            TimeoutError: It has given none until then, and in the time for two of them.
        """
        signs, until = set[bytes | None](), max(until, time.monotonic() + 2 * _STATE_S)
        while not self.holds_lease:
            ledger = Ledger.parse(self._ledger.read().data)
            if self._lease.is_free(ledger):
                self._take_lease(ledger)
                continue
            signs.add(self._store.read(f"state.{ledger.holder}"))
            if len(signs) > 1:
                return False
            if time.monotonic() > until:
                raise TimeoutError(f"learner {ledger.holder}, which merges, gives no sign of life")
            _wait(POLL_S)
        return True

    # Contributions.

    def _may_send(self) -> bool:
        is_time = self.steps_done - self._last_sent >= self._pace
        return is_time and self._contributions.may_send(self._turn) and not self.is_replaced

    def _send(self, index: int, theta: Array, is_last: bool) -> None:
        """Add a contribution to the queue of the thread, from this learner's values of a fragment."""
        if (sent := self._contributions.send(index, theta, self.steps_done)) is None:
            return
        header = {
            "learner": self._name,
            "generation": self.generation,
            "number": sent.number,
            "base": sent.base,
            "examples": self.examples,
            "new_examples": sent.steps * self._unit,
            "new_steps": sent.steps,
            "last": is_last,
        }
        self._outgoing.append((index, header, sent.delta))
        self._turn, self._last_sent = (index + 1) % len(self._fragments), self.steps_done
        if index == 0:
            self._unmerged = sent.number
        self._sent_s.append(time.monotonic())
        self._wake.set()

    def _align(self, mine: Merged) -> None:
        """Contribute later from now on, if the last contribution was merged with those of learners that came later.

        Learners of equal speed then contribute at nearly the same time: what is merged late is worth less. The first
        fragment shifts the others.
        """
        if 0 < self._unmerged <= mine.number:
            period, self._unmerged = self._pace * len(self._fragments), 0
            ahead = int(period * min(0.5, mine.ahead_s / self._interval_s))
            if ahead > period // _LOOKS:
                self._last_sent += ahead

    def _waits_for_range(self, has_examples: bool) -> bool:
        """Return whether to wait for the next range, which takes milliseconds if the store can be used."""
        if has_examples:
            self._waits_since = math.inf
            return False
        now = time.monotonic()
        self._waits_since = min(self._waits_since, now)
        self._wake.set()
        return self._trouble.since is None and not self.is_replaced and now - self._waits_since < _WAIT_S

    def _reset(self) -> None:
        """Begin the generation that the thread has entered, without the work that was not merged."""
        self._written = [0] * len(self._fragments)  # before the generation: the thread writes both into the state
        self._unmerged, self._waits_since = 0, math.inf
        self.generation, self._entered = self._entered, 0
        self.examples, self._began_steps, self._kept_steps = 0, self.steps_done, self._steps_before
        self._claims.begin()
        self._contributions = Contributions(self._layout, self._fragments, self._newest, self.steps_done)

    # The thread.

    def _run(self) -> None:
        try:
            work_s = 0.0
            while not self._closing.is_set():
                self._wake.wait(min(POLL_S, max(self._look_s, _REST * work_s)))
                self._wake.clear()
                began = time.monotonic()
                try:
                    self._work()
                except OSError as error:
                    self._trouble.report(error)
                else:
                    self._trouble.end()
                work_s = time.monotonic() - began
        except BaseException as error:
            self._error = error

    def _work(self) -> None:
        self._write_work()
        now = time.monotonic()
        if now - self._stated_s >= _STATE_S:
            self._write_state()
        self._read_versions()
        self._claims.measure(now, self.examples)
        self._claims.claim_if_due(self.generation, self.examples, self._newest)
        if now - self._looked_s >= _STATE_S or self.holds_lease:
            self._looked_s = now
            self._duties(self._look())

    def _write_work(self) -> None:
        """Write the contributions that wait, except those of an earlier generation."""
        wrote = False
        while self._outgoing:
            index, header, delta = self._outgoing[0]
            number, generation = header["number"], header["generation"]
            if generation == self.generation and not self._entered:
                self._store.replace(work_file(self._name, generation, index, number), pack(header, [delta]))
                with self._lock:  # the training thread may have begun another generation
                    if generation == self.generation:
                        self._written[index], wrote = number, True
            self._outgoing.popleft()
        if wrote:
            self._write_state()

    @property
    def _interval_s(self) -> float:
        """The mean time between two contributions to the same fragment."""
        cycles = len(self._sent_s) - 1
        return (self._sent_s[-1] - self._sent_s[0]) / cycles * len(self._fragments) if cycles > 0 else LEASE_S

    @property
    def _look_s(self) -> float:
        """The time to the next look at the store: late news are worth less, if other learners contribute often."""
        if self._is_alone or self._trouble.since is not None or len(self._sent_s) < 2:
            return POLL_S
        looks = _LOOKS * (_MORE if self._unmerged else 1)
        return min(POLL_S, max(_SHORTEST_S, self._interval_s / len(self._fragments) / looks))

    def _write_state(self, ended: bool = False) -> None:
        self._beat += 1
        state = {
            "generation": self.generation,
            "beat": self._beat,
            "sent": self._written,
            "interval_s": self._interval_s,
            "examples_per_s": self._claims.rate,
            "examples": self.examples,
            "ended": ended,
        }
        data = json.dumps(state).encode()
        self._store.replace(f"state.{self._name}", data + b" " * (-len(data) % _STATE_BYTES))
        self._stated_s = time.monotonic()

    def _read_versions(self) -> None:
        for index in range(len(self._fragments)):
            if not self._versions.changed(index) and not self.holds_lease and not self._closing.is_set():
                continue
            version = self._synchronizer.newest[index] if self.holds_lease else self._versions.read(index)
            if version is not None and version.number > self._newest[index].number:
                self._newest[index] = version
                with self._lock:
                    self._news[index] = version

    def _look(self) -> Ledger:
        """Return the ledger; note whether this generation is still the learner's."""
        ledger = Ledger.parse(self._ledger.read().data)
        self._is_alone, self.ended = ledger.living == 1, ledger.ended or self.ended
        # An older ledger is in place of a damaged one if it has an earlier generation, or none.
        member, own = ledger.members.get(self._name, Member()), max(self.generation, self._entered)
        if member.generation not in (self.generation, self._entered):
            if member.process and member.process != self._process and member.generation > own:
                self.is_replaced = True
                self._closing.set()
            elif not self._closing.is_set():
                _log.warning("the other learners had given this one up; it continues from the common parameters")
                self._reenter()
        return ledger

    def _duties(self, ledger: Ledger) -> None:
        """Merge, or look whether the learner that does is alive."""
        if self.is_replaced:
            return
        self._lease.check(ledger)
        if self.holds_lease:
            self._synchronizer.poll(ledger)
        elif self._lease.is_free(ledger):
            self._take_lease(ledger)

    def _take_lease(self, seen: Ledger) -> None:
        self._synchronizer.begin()
        self._lease.take(seen)

    def _enter(self) -> int:
        """Begin a generation of this learner in the ledger, and return it."""

        def apply(ledger: Ledger) -> None:
            former = ledger.members.get(self._name, Member()).generation
            ledger.join(self._name, self._process, *merged_work(self._newest, self._name, former))

        member = change(self._ledger, apply).members[self._name]
        self._steps_before, generation = member.steps, member.generation
        for former in (generation - 1, generation - 2):  # ended by this call, or given up by a process that has died
            delete_work(self._store, self._name, former, len(self._fragments))
        return generation

    def _reenter(self) -> None:
        """Begin another generation in this process; the training thread begins it with its next ``exchange``."""
        entered = self._enter()
        self._claims.drop()
        self._entered = entered


def _wait(seconds: float) -> None:
    """Wait, which counts as progress: it is for a limited time."""
    time.sleep(seconds)
    activity.mark_progress()
