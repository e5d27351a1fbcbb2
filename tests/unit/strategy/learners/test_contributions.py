"""What a learner contributes and receives, without a store."""

from __future__ import annotations

import numpy as np

from mpitrain.core.layout import Layout
from mpitrain.strategy.learners.contributions import Contributions
from mpitrain.strategy.learners.merging import Fragment, fragments_of
from mpitrain.strategy.learners.synchronizer import Merged, Version

LAYOUT = Layout.pack([("a", (8,), "param"), ("b", (8,), "param")])


def version(fragment: Fragment, number: int, examples: int, value: float) -> Version:
    return Version(number, {}, examples, np.full((1, fragment.hi - fragment.lo), value))


def test_examples_change_with_the_version_of_any_fragment() -> None:
    """By them it is known whether the parameters were measured already."""
    fragments = fragments_of(LAYOUT, 2)
    begun = [version(fragment, 1, 0, 0.0) for fragment in fragments]
    own = Contributions(LAYOUT, fragments, begun, 0)
    seen = [own.examples]
    for index in (1, 0, 1):
        theta = np.zeros(fragments[index].hi - fragments[index].lo)
        own.receive(index, version(fragments[index], len(seen) + 1, 100 * len(seen), 1.0), Merged(), theta)
        seen.append(own.examples)
    assert seen == sorted(set(seen))


def test_one_contribution_waits_and_no_change_is_lost_or_sent_twice() -> None:
    (fragment,) = fragments_of(LAYOUT, 1)
    own = Contributions(LAYOUT, [fragment], [version(fragment, 1, 0, 0.0)], 0)
    theta = np.full(fragment.hi, 1.0)  # 1 after the first steps
    first = own.send(0, theta, 10)
    assert first is not None and first.delta[0] == -1 and not own.may_send(0)
    theta = own.receive(0, version(fragment, 2, 10, 5.0), Merged(1, 0), theta + 2)  # of another learner
    assert theta[0] == 8 and not own.may_send(0)
    theta = own.receive(0, version(fragment, 3, 20, 6.0), Merged(1, 1, steps=10), theta)
    assert theta[0] == 8 and own.may_send(0)
    second = own.send(0, theta, 14)
    last = own.send(0, theta + 3, 15)
    assert second is not None and last is not None
    assert (second.delta[0], second.steps, last.delta[0], last.steps, last.number) == (-2, 4, -3, 1, 3)
    assert own.send(0, theta + 3, 15) is None
