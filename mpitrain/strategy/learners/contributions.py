"""The contributions of a learner to the common parameters, without threads and without the store.

For each fragment of the parameters, a learner has the common values ``center`` that it last received, its own values
``theta``, and its values ``sent`` at the time of its last contribution, until that is merged. After some steps it sends
a contribution ``delta``, and goes on training:

    delta = center - theta;   sent = theta   (delta = sent - theta, if it ends while another one waits)

Another process merges contributions (``synchronizer``), and publishes a version of the fragment, which says which ones
it contains. When a learner receives a version, after training for some more steps, it keeps all of its own changes that
the version does not contain:

    it contains the contribution:   theta = version + (theta - sent)
    it does not, or none waits:     theta = theta + (version - center), and the same for ``sent``

So each change is merged once. (Streaming DiLoCo takes a mean of both instead, which forgets a part of the changes that
were made meanwhile; ``outer_optimizer`` states what that cost.) State that is not trained, such as the statistics of
BatchNorm, is taken from the version.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ...core.layout import Array, Layout
from .merging import Fragment
from .synchronizer import Merged, Version

_log = logging.getLogger(__name__)


class Sent(NamedTuple):
    """A contribution.

    Attributes:
        number: Its number among those to this fragment, from 1.
        base: The number of the version on which it is based.
        steps: Number of steps since the contribution before it.
        delta: Shape (hi - lo,): the values before these steps minus those after them.
    """

    number: int
    base: int
    steps: int
    delta: Array


class _OfFragment:
    """The state of one fragment: number and examples of the version in ``center``, and what waits to be merged."""

    def __init__(self, version: Version, step: int) -> None:
        self.base, self.examples, self.number, self.step = version.number, version.examples, 0, step
        self.began, self.lost = step, 0  # of this generation: its first step, and the steps that were left out
        self.sent: tuple[int, int, Array] | None = None  # number, last step, values


class Contributions:
    """The contributions of one generation of a learner. Local; used by the training thread.

    Args:
        versions: The newest versions of the fragments, with which the generation begins.
        step: The number of steps that this process has taken.

    Attributes:
        center: Shape (layout.size,): the common parameters, as last received.
    """

    def __init__(self, layout: Layout, fragments: Sequence[Fragment], versions: Sequence[Version], step: int) -> None:
        self._n_trained, self._fragments = layout.n_trained, fragments
        self._states = [_OfFragment(version, step) for version in versions]
        self.center = np.zeros(layout.size, versions[0].vectors.dtype)
        for fragment, version in zip(fragments, versions, strict=True):
            fragment.of(self.center)[:] = version.vectors[0]

    @property
    def examples(self) -> int:
        """The number of examples that ``center`` contains; the mean of the fragments."""
        return sum(state.examples for state in self._states) // len(self._states)

    @property
    def lost_steps(self) -> int:
        """The number of steps that were left out of the common parameters, or of a fragment."""
        return max(state.lost for state in self._states)

    def may_send(self, index: int) -> bool:
        """Return whether no contribution to a fragment waits."""
        return self._states[index].sent is None

    def send(self, index: int, theta: Array, step: int) -> Sent | None:
        """Return this learner's next contribution to a fragment; None if it has taken no step since the last one."""
        state = self._states[index]
        if state.step == step:
            return None
        before = state.sent[2] if state.sent else self._fragments[index].of(self.center)
        steps, state.step, state.number = step - state.step, step, state.number + 1
        state.sent = state.number, step, theta.copy()
        return Sent(state.number, state.base, steps, before - theta)

    def receive(self, index: int, version: Version, mine: Merged, theta: Array) -> Array:
        """Return this learner's values of a fragment after it has received a version.

        Args:
            mine: What the version contains of this generation.
            theta: Shape (hi - lo,): this learner's values before; not changed.
        """
        state, fragment, new = self._states[index], self._fragments[index], version.vectors[0]
        center = contained = fragment.of(self.center)
        if state.sent and state.sent[0] <= mine.number:
            (_, step, contained), state.sent = state.sent, None
            state.lost = step - state.began - mine.steps
        vectors = [theta + (new - contained)]  # this learner's values, now and when it has sent what waits
        if state.sent:
            vectors.append(sent := state.sent[2])
            sent += new - contained
        kept = max(0, self._n_trained - fragment.lo)
        if not np.isfinite(vectors[0]).all():
            _log.warning("this learner's parameters were not finite: it continues from the common ones")
            kept = 0
        for vector in vectors:
            vector[kept:] = new[kept:]
        center[:], state.base, state.examples = new, version.number, version.examples
        return vectors[0]
