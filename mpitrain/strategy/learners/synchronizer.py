"""The duty of the learner that holds the lease: it merges what the learners have sent."""

from __future__ import annotations

import itertools
import logging
import math
import statistics
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...core.layout import Array, Layout
from ...optim import Optimizer, Updater, sgd
from .ledger import Ledger, change
from .merging import Contribution, Fragment, outer_gradient
from .records import pack, unpack
from .signs import Signs, parse_state
from .store import Register, Store, Value

GRACE = 0.5  # of the shortest time between two contributions of a learner: how long the others are waited for
LOST_S = 60.0  # seconds without news after which a learner's examples are given out again
SLOTS = 2  # contributions to a fragment that may wait: one, and the last one of a learner that ends
_UNREADABLE_S = 5.0  # seconds after which a contribution that cannot be read is dropped
_TOO_LARGE, _SIZES = 10.0, 20  # a contribution this many times as large as the median of the last ones is left out
_log = logging.getLogger(__name__)


class Merged(NamedTuple):
    """Which contributions of a learner to a fragment are part of a version.

    Attributes:
        generation: The generation that has sent them.
        number: The number of the last one.
        examples: Examples of that generation's ranges on which they are based.
        discarded: Number of those that were left out.
        lag: Number of versions that were merged between the one on which the last one is based and its own.
        steps: Number of steps of those that were not left out.
        ahead_s: Seconds between the arrival of the last one, and of the last one of all learners in the same version.
    """

    generation: int = 0
    number: int = 0
    examples: int = 0
    discarded: int = 0
    lag: int = 0
    steps: int = 0
    ahead_s: float = 0.0


class Version(NamedTuple):
    """A version of a fragment of the common parameters.

    Attributes:
        number: From 1, for the initial values.
        merged: What each learner has contributed, by its name.
        examples: Number of examples of all contributions.
        vectors: Shape (1 + number of the outer optimizer's slots, fragment's size): the parameters, and the slots.
    """

    number: int
    merged: dict[str, Merged]
    examples: int
    vectors: Array

    def of(self, name: str, generation: int) -> Merged:
        """Return what a learner's generation has contributed."""
        merged = self.merged.get(name, Merged())
        return merged if merged.generation == generation else Merged(generation)


class Fragments:
    """The versions of all fragments in the store.

    Args:
        n_vectors: Number of vectors of a version.
    """

    def __init__(self, store: Store, fragments: Sequence[Fragment], n_vectors: int, dtype: np.dtype[Any]) -> None:
        self._registers = [Register(store, f"fragment-{index}") for index in range(len(fragments))]
        self._fragments, self._n_vectors, self._dtype = fragments, n_vectors, dtype

    def read(self, index: int) -> Version | None:
        """Return the newest version of a fragment; None if there is none, or it is damaged."""
        value = self._registers[index].read()
        size = self._fragments[index].hi - self._fragments[index].lo
        record = unpack(value.data, self._dtype, self._n_vectors * size)
        if record is None:
            return None
        header = record.header
        merged = {name: Merged(*each) for name, each in header.pop("merged").items()}
        return Version(value.number, merged, **header, vectors=record.values.reshape(self._n_vectors, size))

    def changed(self, index: int) -> bool:
        """Return whether there may be a newer version than the last one that was read."""
        return self._registers[index].changed()

    def swap(self, index: int, version: Version) -> bool:
        """Add a version; return False if another process has added this number."""
        header = {name: getattr(version, name) for name in ("merged", "examples")}
        data = pack(header, [version.vectors])
        return self._registers[index].swap(Value(version.number - 1, b""), data)


def merged_work(versions: Sequence[Version], name: str, generation: int) -> tuple[int, int]:
    """Return the number of examples, and of steps, of a learner's generation that are part of every fragment."""
    merged = [version.of(name, generation) for version in versions]
    return min(each.examples for each in merged), min(each.steps for each in merged)


def work_file(name: str, generation: int, index: int, number: int) -> str:
    """Return the name of the file with a learner's contribution to a fragment."""
    return f"work.{name}.{generation}.{index}.{number % SLOTS}"


def delete_work(store: Store, name: str, generation: int, fragments: int) -> None:
    """Delete the contributions of a generation, which nobody merges any more."""
    for index, slot in itertools.product(range(fragments), range(SLOTS)):
        store.delete(work_file(name, generation, index, slot))


def give_up(store: Store, ledger: Register, versions: Sequence[Version], name: str, generation: int) -> None:
    """Give the examples of a learner out again that are not part of these versions, unless it has a new generation."""
    merged = merged_work(versions, name, generation)

    def apply(ledger: Ledger) -> None:
        if ledger.members[name].generation == generation:
            ledger.give_up(name, *merged)

    change(ledger, apply)
    delete_work(store, name, generation, len(versions))


class Synchronizer:
    """Merges contributions; used by one thread. Methods raise OSError.

    A version is created exclusively, and says which contributions it contains. Therefore nothing is merged twice or
    lost if the lease passes on during a merge: one of two versions of the same number exists, and whoever merges next
    continues from it.

    Args:
        optimizer: The outer optimizer.

    Attributes:
        center: Shape (layout.size,): the common parameters.
        newest: The newest version of each fragment.
        speeds: The examples/s of each learner that has a process, at the last ``poll``.
    """

    def __init__(
        self,
        store: Store,
        ledger: Register,
        fragments: Sequence[Fragment],
        versions: Fragments,
        layout: Layout,
        optimizer: Optimizer,
        dtype: np.dtype[Any],
    ) -> None:
        self._store, self._ledger, self._fragments, self._versions = store, ledger, fragments, versions
        self._layout, self._dtype = layout, dtype
        self.center, *slots = (np.zeros(layout.size, dtype) for _ in ("params", *optimizer.slots))
        self._vectors = [self.center, *slots]
        self._updater = Updater(optimizer, layout, self.center, dict(zip(optimizer.slots, slots, strict=True)))
        self._averaging = Updater(sgd(1.0), layout, self.center, {})  # for last contributions
        self.newest: list[Version] = []
        self.speeds: list[float] = []
        self._came_s: list[dict[str, float]] = [{} for _ in fragments]  # since when a learner's contribution waits
        self._sizes = [deque[float](maxlen=_SIZES) for _ in fragments]  # of the last contributions
        self._signs, self._silent_s = Signs(store), dict[str, float]()
        self._unreadable_s: dict[tuple[str, int, int, int], float] = {}

    def prepare(self) -> None:
        """Compile what merging needs, which takes a while, before others rely on this process. ``begin`` follows."""
        for updater in (self._updater, self._averaging):
            updater.update(0, self._layout.size, np.zeros((1, self._layout.size), self._dtype), 0)

    def begin(self) -> None:
        """Read the newest versions; whatever other processes have merged is known then."""
        read = [self._versions.read(index) for index in range(len(self._fragments))]
        newest = [version for version in read if version is not None]
        if None in read:
            raise OSError(f"the newest file of fragment-{read.index(None)}, the common parameters, is damaged")
        self.newest = newest
        for fragment, version in zip(self._fragments, self.newest, strict=True):
            self._load(fragment, version)

    def poll(self, ledger: Ledger, waits: bool = True) -> bool:
        """Merge what is due, and give up learners that have died or ended; return whether anything was merged.

        Args:
            waits: Whether to wait for further contributions for a while.
        """
        now, states = time.monotonic(), self._states(ledger)
        self.speeds = [state.get("examples_per_s", 0.0) for state in states.values()]
        merged = False
        for index in range(len(self._fragments)):
            merged |= self._poll(index, states, ledger, now, waits)
        for name, state in states.items():
            generation = ledger.members[name].generation
            is_current = state.get("generation") == generation
            pending = is_current and any(
                sent > version.of(name, generation).number
                for sent, version in zip(state["sent"], self.newest, strict=True)
            )
            is_lost = self._silent_s[name] > LOST_S
            if (is_current and state.get("ended") and not pending) or is_lost:
                if is_lost and not state.get("ended"):
                    _log.warning("learner %s is given up: no news for %.0f s", name, LOST_S)
                give_up(self._store, self._ledger, self.newest, name, generation)
        return merged

    def _states(self, ledger: Ledger) -> dict[str, dict[str, Any]]:
        """Return the state of each learner that has a process."""
        states = {}
        for name, member in ledger.members.items():
            if not member.process:
                self._signs.forget(name)
                continue
            data, self._silent_s[name] = self._signs.look(name)
            states[name] = parse_state(data)
        return states

    def _poll(
        self, index: int, states: Mapping[str, Mapping[str, Any]], ledger: Ledger, now: float, waits: bool
    ) -> bool:
        """Merge the contributions to a fragment, if they are complete or the grace time has passed."""
        version = self.newest[index]
        waiting, others = {}, []
        for name, state in states.items():
            generation = ledger.members[name].generation
            if state.get("generation") == generation and state["sent"][index] > version.of(name, generation).number:
                waiting[name] = state
            elif not state.get("ended") and self._silent_s[name] < 2 * state.get("interval_s", 0) + 1:
                others.append(state)
        came_s = self._came_s[index] = {name: self._came_s[index].get(name, now) for name in waiting}
        if not waiting:
            return False
        grace_s = GRACE * min(state["interval_s"] for state in waiting.values())
        if waits and others and now - min(came_s.values()) < grace_s:
            return False
        return self._merge(index, waiting, others, now)

    def _merge(
        self, index: int, waiting: Mapping[str, Mapping[str, Any]], others: Sequence[Mapping[str, Any]], now: float
    ) -> bool:
        fragment, version = self._fragments[index], self.newest[index]
        merged, accepted, sizes = dict(version.merged), dict[str, Contribution](), list[float]()
        came_s = self._came_s[index]
        for name, state in waiting.items():
            contribution, after = self._contribution(index, name, state, now)
            if contribution is None:
                if after.number > version.of(name, after.generation).number:
                    merged[name] = after
                else:
                    others = [*others, state]  # it will be merged later
                continue
            trained = contribution.delta[: max(0, self._layout.n_trained - fragment.lo)]
            size = float(np.linalg.norm(trained)) / contribution.steps
            problem = self._problem(index, size, bool(np.isfinite(contribution.delta).all()))
            if problem:
                _log.warning("the work of learner %s is left out: %s", name, problem)
                before = version.of(name, after.generation)
                left_out = after.number - before.number
                after = after._replace(discarded=after.discarded + left_out, steps=before.steps)
            else:
                accepted[name] = contribution
            sizes += [size] if math.isfinite(size) else []
            merged[name] = after
        if merged == version.merged:
            return False
        if accepted:
            last_s = max(came_s[name] for name in accepted)
            merged |= {name: merged[name]._replace(ahead_s=last_s - came_s[name]) for name in accepted}
            delta = outer_gradient(fragment, self._layout.n_trained, list(accepted.values()))
            delta *= delta.dtype.type(_share([waiting[name] for name in accepted], others))
            updater = self._averaging if all(each.is_last for each in accepted.values()) else self._updater
            updater.update(fragment.lo, fragment.hi, delta.reshape(1, -1), 0, origin=fragment.lo)
        new = Version(
            version.number + 1,
            merged,
            version.examples + sum(each.examples for each in accepted.values()),
            np.stack([fragment.of(vector) for vector in self._vectors]),
        )
        self._came_s[index] = {}
        try:
            is_newest = self._versions.swap(index, new)
        except OSError:
            self._load(fragment, version)
            raise
        if is_newest:
            self.newest[index] = new
            self._sizes[index] += sizes  # also those left out: if all grow for long, they are no exception any more
            return True
        newer = self._versions.read(index)  # another process has merged: continue from its version
        self.newest[index] = version if newer is None else newer
        self._load(fragment, self.newest[index])
        return False

    def _contribution(
        self, index: int, name: str, state: Mapping[str, Any], now: float
    ) -> tuple[Contribution | None, Merged]:
        """Return the sum of a learner's contributions that are not merged, or None; and what is merged with it.

        A contribution that cannot be read for a while is left out.
        """
        fragment, version, generation = self._fragments[index], self.newest[index], state["generation"]
        merged = version.of(name, generation)
        delta, examples, steps, age, is_last = None, 0, 0, 0, False
        for number in range(merged.number + 1, state["sent"][index] + 1):
            data = self._store.read(work_file(name, generation, index, number))
            record = unpack(data, self._dtype, fragment.hi - fragment.lo)
            header: dict[str, Any] = {} if record is None else record.header
            author = header.get("learner", name)  # earlier versions did not write it
            of = (author, header.get("generation"), header.get("number"))
            if record is None or of != (name, generation, number):
                if now - self._unreadable_s.setdefault((name, index, generation, number), now) < _UNREADABLE_S:
                    break
                _log.warning("the work of learner %s is left out: the file cannot be read", name)
                merged = merged._replace(number=number, discarded=merged.discarded + 1)
                continue
            delta = record.values if delta is None else delta + record.values
            examples, steps = examples + header["new_examples"], steps + header["new_steps"]
            age = max(0, version.number - header["base"])  # less if another process has merged since
            is_last = header.get("last", False)  # earlier versions did not write it
            done = merged.steps + header["new_steps"]
            merged = merged._replace(number=number, examples=header["examples"], lag=age, steps=done)
        return None if delta is None else Contribution(delta, examples, steps, age, is_last), merged

    def _problem(self, index: int, size: float, is_finite: bool) -> str:
        """Return why a contribution must not be merged; empty if it may be.

        Args:
            size: The norm of the trained part, divided by the number of steps.
        """
        sizes = self._sizes[index]
        if not is_finite:
            return "it is not finite"
        if len(sizes) > 4 and size > _TOO_LARGE * statistics.median(sizes):
            return f"its norm is {size:.3g} per step, and the median of the last ones is {statistics.median(sizes):.3g}"
        return ""

    def _load(self, fragment: Fragment, version: Version) -> None:
        for vector, values in zip(self._vectors, version.vectors, strict=True):
            fragment.of(vector)[:] = values


def _share(waiting: Iterable[Mapping[str, Any]], others: Iterable[Mapping[str, Any]]) -> float:
    """Return the part that learners have in the examples/s of all that train; before these are known, in their number.

    Learners of ``others`` that have not trained yet do not count.
    """
    speeds = [state["examples_per_s"] for state in waiting]
    rest = [state["examples_per_s"] for state in others if state.get("examples_per_s")]
    if not all(speeds):
        return len(speeds) / (len(speeds) + len(rest))
    return float(sum(speeds) / (sum(speeds) + sum(rest)))
