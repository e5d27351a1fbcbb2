"""A learner: it trains apart, and takes part in common parameters through a store. It waits for no other learner.

For each fragment of the parameters, a learner has the common values ``center`` that it last received, its own values
``theta``, and its values ``sent`` at the time of its last contributions that are not merged yet, oldest first. After
some steps it sends a contribution ``delta``, and goes on training:

    delta = sent[-1] - theta   (center - theta, if nothing waits);   sent.append(theta)

Another process merges contributions (``synchronizer``), and publishes a version of the fragment, which says which ones
it contains. When a learner receives a version, after training for some more steps, it keeps all of its own changes that
the version does not contain:

    it contains contribution k:   theta = version + (theta - sent[k])
    it contains none of them:     theta = theta + (version - center), and the same for each of ``sent``

So each change is merged once. (Streaming DiLoCo takes a mean of both instead, which forgets a part of the changes that
were made meanwhile; ``outer_optimizer`` states what that cost.) State that is not trained, such as the statistics of
BatchNorm, is taken from the version.

A thread does everything that touches the store. If the store cannot be reached, training goes on, and the thread tries
again.
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

from ...core.layout import Array, Layout
from ...errors import ConfigError
from ...optim import Optimizer
from .ledger import Ledger, Left, Range, change
from .merging import Fragment, fragments_of
from .records import pack
from .store import Register, Store
from .synchronizer import (
    LOST_S,
    SLOTS,
    Fragments,
    Synchronizer,
    Version,
    give_up,
    merged_examples,
    parse_state,
    read_state,
)

POLL_S = 0.2  # seconds between two looks at the store
LEASE_S = 10.0  # seconds without a sign of life after which another learner merges
_STATE_S = 1.0  # seconds between two signs of life
_RANGE_S = 20.0  # seconds of training for which examples are claimed at once
_AHEAD_S = 2.0  # seconds of training for which examples are claimed in advance
_SHARE = 8  # at most this part of a learner's share of the remaining examples is claimed at once
_WAIT_S = 2.0  # seconds for which a learner waits for its next range before it trains examples that it has not claimed
_LAST_S = 2.0  # seconds for which the last contributions of all learners are merged together
_LAST = SLOTS - 1  # contributions that may wait before the last one
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
    """

    fragments: list[tuple[Fragment, Array]]
    ranges: list[Range]
    is_reset: bool
    left: Left


class Learner:
    """A process of a learner; one rank has it. Its methods are local; they do not wait for the store, except ``join``
    and ``finish``.

    Args:
        name: The learner's name, unique in the run.
        process: Identifies the process.
        steps: Number of steps between two contributions to the same fragment.
        unit: Number of examples of a step.

    Attributes:
        center: Shape (layout.size,): the common parameters, as last received.
        examples: Number of examples of its ranges that it has trained; set by the caller.
        steps_done: Number of steps that it has trained; set by the caller.
        total, unit: Number of examples of the run, and of one of its steps.
        is_complete: Whether the common parameters contain all examples, at the end.
        is_replaced: Whether another process trains this learner now, so that this one must end.
        holds_lease: Whether this process merges.
    """

    def __init__(self, group: Group, name: str, process: str, steps: int, unit: int) -> None:
        self._store, self._layout, self._dtype = group.store, group.layout, group.dtype
        self._group, self._name, self._process, self._unit = group, name, process, unit
        self._fragments = fragments_of(group.layout, min(group.fragments, steps))
        self._pace = max(1, steps // len(self._fragments))
        self._first_claim = 4 * self._pace * len(self._fragments) * unit  # in examples, before the speed is known
        self._ledger = Register(group.store, "ledger", keep=64)
        self._versions = Fragments(group.store, self._fragments, 1 + len(group.optimizer.slots), group.dtype)
        self._synchronizer = Synchronizer(
            group.store, self._ledger, self._fragments, self._versions, group.layout, group.optimizer, group.dtype
        )
        self.center = np.zeros(group.layout.size, group.dtype)
        self._newest: list[Version] = []  # as read by the thread
        self._received = [0] * len(self._fragments)  # the number of the version in ``center``
        self._sent: list[deque[tuple[int, Array]]] = [deque() for _ in self._fragments]
        self._numbers = [0] * len(self._fragments)  # of the last contributions
        self._written = [0] * len(self._fragments)  # those of them that are in the store
        self._since = [0] * len(self._fragments)  # the steps at that time
        self._outgoing: deque[tuple[int, dict[str, Any], Array]] = deque()
        self._turn, self._last_sent = 0, 0  # the fragment to send next, and the step of the last contribution
        self._sent_s = deque[float](maxlen=2 * len(self._fragments) + 1)  # when contributions were made
        self._news: dict[int, Version] = {}
        self._ranges: list[Range] = []
        self._left = self._last_left = Left.SOME
        self._watched: dict[tuple[str, int], tuple[bytes, float]] = {}  # see ``_all_live``
        self.is_replaced = self.holds_lease = self.is_complete = False
        self.generation = self.examples = self.steps_done = self.total = self._claimed = self._lease = 0
        self._entered = 0  # a new generation, which the training thread has not begun yet
        self._rate, self._measured = 0.0, (0.0, 0)  # examples/s, and when how many had been trained
        self._lock, self._closing, self._wake = threading.Lock(), threading.Event(), threading.Event()
        self._waits_since = math.inf  # since when this learner has no range
        self._error: BaseException | None = None
        self._beat, self._stated_s, self._looked_s = 0, 0.0, 0.0
        self._holder_heard: tuple[str, bytes, float] = ("", b"", 0.0)
        self._trouble_since: float | None = None
        self._thread = threading.Thread(target=self._run, name="learner", daemon=True)

    # The methods of the training thread.

    def join(self, params: Array) -> None:
        """Take part in the run, or begin it with these parameters; ``center`` and the first range are known then.

        Raises:
            ConfigError: The run is one of another model, data set or version.
            OSError: The store cannot be used.
        """
        begun = Ledger(dict(self._group.facts), self._group.total, self._unit).dump()
        if not (first := self._ledger.read()).data:
            self._ledger.swap(first, begun)
        ledger = Ledger.parse(self._ledger.read().data)
        for name, value in Ledger.parse(begun).facts.items():
            if (other := ledger.facts.get(name)) != value:
                raise ConfigError(
                    f"--join: this learner has another {name} than the run that it would join: {value}, not {other}; "
                    "use the same job and options, or another directory"
                )
        for index, fragment in enumerate(self._fragments):
            if self._versions.read(index) is None:
                vectors = np.zeros((1 + len(self._group.optimizer.slots), fragment.hi - fragment.lo), self._dtype)
                vectors[0] = fragment.of(params)
                self._versions.swap(index, Version(1, {}, 0, 0, 0, vectors))
        self._synchronizer.prepare()
        self._synchronizer.begin()
        self._newest = list(self._synchronizer.newest)
        self.total, self.unit = ledger.total, ledger.unit
        self.generation = self._enter()
        for fragment, version in zip(self._fragments, self._newest, strict=True):
            fragment.of(self.center)[:] = version.vectors[0]
        self._received = [version.number for version in self._newest]
        self._write_state()
        self._claim(self._first_claim)
        self._thread.start()

    def all_fragments(self) -> list[tuple[Fragment, Array]]:
        """Return the common parameters as ``News.fragments``."""
        return [(fragment, fragment.of(self.center)) for fragment in self._fragments]

    @property
    def is_due(self) -> bool:
        """Whether ``exchange`` has something to do, such as to raise an exception that was raised in the thread."""
        has_news = self._news or self._ranges or self._entered or self._left is not self._last_left
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
        if self._error is not None:
            raise self._error
        with self._lock:
            received, self._news = self._news, {}
            ranges, self._ranges = self._ranges, []
            left = self._last_left = self._left
            if left is Left.SOME and self._waits_for_range(bool(ranges)):
                left = Left.UNKNOWN
            is_reset = self._entered > 0
            if is_reset:
                self._reset()
        now = {}
        for index, version in sorted(received.items()):
            now[index] = self._received_values(index, version, self._fragments[index].of(params), is_reset)
        sends = range(len(self._fragments)) if ends else [self._turn] if self._may_send() else []
        for index in sends:
            self._send(index, now.get(index, self._fragments[index].of(params)))
        return News([(self._fragments[i], values) for i, values in now.items()], ranges, is_reset, left)

    @property
    def merged(self) -> int:
        """The number of examples that the common parameters contain."""
        return min(version.examples for version in self._newest)

    def finish(self, save: Callable[[Array, int], None]) -> bool:
        """End: bring the last contributions to the store, and merge if no other learner does.

        Args:
            save: Called with the common parameters and the number of examples that they contain, if this process
                merges.

        Returns:
            Whether this process has merged last; ``is_complete`` is then known.

        Raises:
            OSError: The store cannot be used, also not a while later.
        """
        self._closing.set()
        self._thread.join()
        until = time.monotonic() + LOST_S
        while not self.is_replaced:
            try:
                return self._finish(save)
            except OSError as error:
                if time.monotonic() > until:
                    raise
                self._report_trouble(error)
                time.sleep(_STATE_S)
        return False

    def _finish(self, save: Callable[[Array, int], None]) -> bool:
        self._write_work()
        self._write_state(ended=True)
        while self._must_merge():
            until = time.monotonic() + _LAST_S
            while self._others(ended=False) and time.monotonic() < until:
                time.sleep(POLL_S)
            while self._synchronizer.poll(Ledger.parse(self._ledger.read().data), waits=False):
                pass
            self._newest = list(self._synchronizer.newest)
            save(self._synchronizer.center, self._synchronizer.examples)
            self._resign()
            # A learner that ends now has sent its last work before it looks whether another one merges. So either it
            # sees that this one has resigned, or this one sees that it has ended.
            if not self._others(ended=True):
                ledger = Ledger.parse(self._ledger.read().data)
                self.is_complete = ledger.is_given_out
                return not ledger.living
            time.sleep(POLL_S)
        return False

    def _others(self, ended: bool) -> bool:
        """Return whether there are learners with a process that have said that they end, or that have not."""
        members = Ledger.parse(self._ledger.read().data).members
        return any(
            bool(read_state(self._store, name).get("ended")) is ended
            for name, member in members.items()
            if member.process
        )

    def _must_merge(self) -> bool:
        """Return whether this process has the lease, or can take it; wait for a sign of life of another that has it."""
        signs: set[bytes] = set()
        while not self.holds_lease:
            ledger = Ledger.parse(self._ledger.read().data)
            if ledger.holder in ("", self._name) or self._is_silent(ledger):
                self._take_lease(ledger)
                continue
            signs.add(self._holder_heard[1])
            if len(signs) > 1:
                return False
            time.sleep(POLL_S)
        return True

    # Contributions.

    def _may_send(self) -> bool:
        is_time = self.steps_done - self._last_sent >= self._pace
        return is_time and len(self._sent[self._turn]) < _LAST and not self.is_replaced

    def _send(self, index: int, theta: Array) -> None:
        """Add a contribution to the queue of the thread, from this learner's values of a fragment."""
        before = self._sent[index][-1][1] if self._sent[index] else self._fragments[index].of(self.center)
        if (steps := self._since[index]) == self.steps_done:
            return
        delta, theta = before - theta, theta.copy()
        self._numbers[index] += 1
        header = {
            "generation": self.generation,
            "number": self._numbers[index],
            "base": self._received[index],
            "examples": self.examples,
            "new_examples": (self.steps_done - steps) * self._unit,
            "new_steps": self.steps_done - steps,
        }
        self._sent[index].append((self._numbers[index], theta))
        self._since[index] = self.steps_done
        self._outgoing.append((index, header, delta))
        self._turn, self._last_sent = (index + 1) % len(self._fragments), self.steps_done
        self._sent_s.append(time.monotonic())

    def _waits_for_range(self, has_one: bool) -> bool:
        """Return whether to wait for the next range, which takes milliseconds if the store can be used."""
        if has_one or self.examples < self._claimed:
            self._waits_since = math.inf
            return False
        now = time.monotonic()
        self._waits_since = min(self._waits_since, now)
        self._wake.set()
        return self._trouble_since is None and not self.is_replaced and now - self._waits_since < _WAIT_S

    def _reset(self) -> None:
        """Begin the generation that the thread has entered, without the work that was not merged."""
        self.generation, self._entered = self._entered, 0
        self.examples = self._claimed = 0
        self._outgoing.clear()
        for sent in self._sent:
            sent.clear()
        self._numbers = [0] * len(self._fragments)
        self._written = [0] * len(self._fragments)
        self._since = [self.steps_done] * len(self._fragments)

    def _received_values(self, index: int, version: Version, theta: Array, is_reset: bool) -> Array:
        """Return this learner's new values of a fragment, and update ``center`` and ``sent``."""
        fragment, mine = self._fragments[index], version.of(self._name, self.generation)
        new, center = version.vectors[0], self._fragments[index].of(self.center)
        contained = center
        while self._sent[index] and self._sent[index][0][0] <= mine.number:
            contained = self._sent[index].popleft()[1]
        vectors = [theta + (new - contained)]  # this learner's values, now and when it has sent what waits
        vectors += [sent for _, sent in self._sent[index]]
        for sent in vectors[1:]:
            sent += new - contained
        is_broken = not np.isfinite(vectors[0]).all()
        if is_broken:
            _log.warning("this learner's parameters were not finite: it continues from the common ones")
        kept = 0 if is_reset or is_broken else max(0, self._layout.n_trained - fragment.lo)
        for vector in vectors:
            vector[kept:] = new[kept:]
        center[:] = new
        self._received[index] = version.number
        return vectors[0]

    # The thread.

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                self._wake.wait(POLL_S)
                self._wake.clear()
                try:
                    self._work()
                except OSError as error:
                    self._report_trouble(error)
                else:
                    self._report_end_of_trouble()
        except BaseException as error:
            self._error = error

    def _work(self) -> None:
        self._write_work()
        now = time.monotonic()
        if now - self._stated_s >= _STATE_S:
            self._write_state()
        self._read_versions()
        self._measure(now)
        ahead = self._claimed - self.examples
        if self._left is not Left.NONE and ahead < max(self._unit, self._rate * _AHEAD_S):
            self._claim(int(self._rate * _RANGE_S) or self._first_claim)
        if now - self._looked_s >= _STATE_S or self.holds_lease:
            self._looked_s = now
            self._duties(self._look())

    def _write_work(self) -> None:
        """Write the contributions that wait."""
        wrote = False
        while self._outgoing:
            index, header, delta = self._outgoing[0]
            number = header["number"]
            if header["generation"] == self.generation:
                self._store.replace(f"work.{self._name}.{index}.{number % SLOTS}", pack(header, [delta]))
                self._written[index], wrote = number, True
            self._outgoing.popleft()
        if wrote:
            self._write_state()

    def _write_state(self, ended: bool = False) -> None:
        self._beat += 1
        cycles = len(self._sent_s) - 1
        interval_s = (self._sent_s[-1] - self._sent_s[0]) / cycles * len(self._fragments) if cycles > 0 else LEASE_S
        state = {
            "generation": self.generation,
            "beat": self._beat,
            "sent": self._written,
            "received": self._received,
            "interval_s": interval_s,
            "examples_per_s": self._rate,
            "examples": self.examples,
            "ended": ended,
        }
        self._store.replace(f"state.{self._name}", json.dumps(state).encode())
        self._stated_s = time.monotonic()

    def _read_versions(self) -> None:
        for index in range(len(self._fragments)):
            if not self._versions.changed(index) and not self.holds_lease:
                continue
            version = self._synchronizer.newest[index] if self.holds_lease else self._versions.read(index)
            if version is not None and version.number > self._newest[index].number:
                self._newest[index] = version
                with self._lock:
                    self._news[index] = version

    def _measure(self, now: float) -> None:
        """Measure the speed, over at least a second."""
        since, examples = self._measured
        if now - since >= _STATE_S:
            if since:
                speed = max(0, self.examples - examples) / (now - since)
                self._rate = speed if not self._rate else (self._rate + speed) / 2
            self._measured = now, self.examples

    def _claim(self, count: int) -> None:
        """Claim about ``count`` examples, but no more than a part of this learner's share of the remaining ones."""
        merged = merged_examples(self._newest, self._name, self.generation)

        def apply(ledger: Ledger) -> None:
            if ledger.members[self._name].generation == self.generation:
                ledger.settle(self._name, merged)
                most = (ledger.total - ledger.next) // (_SHARE * max(1, ledger.living))
                least = int(self._rate * _STATE_S)
                ledger.claim(self._name, max(self._unit, least, min(count, most)), self._unit)

        ledger = change(self._ledger, apply)
        member = ledger.members[self._name]
        if member.generation != self.generation:
            return
        left = Left.SOME if not ledger.is_given_out else Left.NONE if self._all_live(ledger) else Left.UNKNOWN
        with self._lock:
            self._left, claimed = left, member.merged
            for lo, hi in member.held:  # the ledger decides: an attempt that seemed to fail may have succeeded
                if claimed >= self._claimed:
                    self._ranges.append((lo, hi))
                    self._claimed += hi - lo
                claimed += hi - lo

    def _all_live(self, ledger: Ledger) -> bool:
        """Return whether all learners that hold examples have given a sign of life since this was first asked.

        Those that give none for a while are given up, so that this learner can claim their examples. Those of a learner
        that has ended are free soon, as far as it has not trained them.
        """
        all_live, now = True, time.monotonic()
        for name, member in ledger.members.items():
            if name == self._name or not member.held:
                continue
            state = self._store.read(f"state.{name}") or b"{}"
            first, since = self._watched.setdefault((name, member.generation), (state, now))
            has_ended = bool(parse_state(state).get("ended"))
            all_live &= state != first and not has_ended
            if state == first and not has_ended and now - since > LOST_S:
                give_up(self._ledger, self._newest, name, member.generation)
        return all_live

    def _look(self) -> Ledger:
        """Return the ledger; note whether this generation is still the learner's."""
        ledger = Ledger.parse(self._ledger.read().data)
        member = ledger.members[self._name]
        if member.generation not in (self.generation, self._entered) and not self._closing.is_set():
            if member.process and member.process != self._process:
                self.is_replaced, self.holds_lease = True, False
                self._closing.set()
            else:
                _log.warning("the other learners had given this one up; it continues from the common parameters")
                self._reenter()
        return ledger

    def _duties(self, ledger: Ledger) -> None:
        """Merge, or look whether the learner that does is alive."""
        if self.is_replaced:
            return
        if self.holds_lease and ledger.lease != self._lease:
            self.holds_lease = False  # another learner has taken it over
        if self.holds_lease:
            self._synchronizer.poll(ledger)
        elif ledger.holder in ("", self._name) or self._is_silent(ledger):
            self._take_lease(ledger)

    def _is_silent(self, ledger: Ledger) -> bool:
        """Return whether the learner that merges has given no sign of life for ``LEASE_S``, by this process's clock."""
        holder = ledger.members.get(ledger.holder)
        if holder is None or not holder.process:
            return True
        state, now = self._store.read(f"state.{ledger.holder}") or b"", time.monotonic()
        if self._holder_heard[:2] != (ledger.holder, state):
            self._holder_heard = ledger.holder, state, now
        return now - self._holder_heard[2] > LEASE_S

    def _take_lease(self, seen: Ledger) -> None:
        """Take over the duty to merge, unless another learner has done so since ``seen``."""
        if self.holds_lease:
            return

        def apply(ledger: Ledger) -> None:
            if ledger.lease == seen.lease:
                ledger.holder, ledger.lease = self._name, seen.lease + 1

        ledger = change(self._ledger, apply)
        if (ledger.holder, ledger.lease) == (self._name, seen.lease + 1):
            self._lease = ledger.lease
            self._synchronizer.begin()
            self.holds_lease = True

    def _resign(self) -> None:
        def apply(ledger: Ledger) -> None:
            if ledger.lease == self._lease:
                ledger.holder = ""

        change(self._ledger, apply)
        self.holds_lease = False

    def _enter(self) -> int:
        """Begin a generation of this learner in the ledger, and return it."""
        generation = 0

        def apply(ledger: Ledger) -> None:
            nonlocal generation
            member = ledger.members.get(self._name)
            merged = 0 if member is None else merged_examples(self._newest, self._name, member.generation)
            generation = ledger.join(self._name, self._process, merged)

        change(self._ledger, apply)
        return generation

    def _reenter(self) -> None:
        """Begin another generation in this process; the training thread begins it with its next ``exchange``."""
        entered = self._enter()
        with self._lock:
            self._entered, self._ranges, self._left = entered, [], Left.SOME
            self._news = dict(enumerate(self._newest))

    # Trouble with the store.

    def _report_trouble(self, error: OSError) -> None:
        if self._trouble_since is None:
            self._trouble_since = time.monotonic()
            reason = error.strerror or error
            _log.warning("the folder of the learners cannot be used: %s; training goes on alone meanwhile", reason)

    def _report_end_of_trouble(self) -> None:
        if self._trouble_since is not None:
            seconds, self._trouble_since = time.monotonic() - self._trouble_since, None
            _log.info("the folder of the learners can be used again, after %.0f s", seconds)
