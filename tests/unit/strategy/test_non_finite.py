"""Steps with a loss that is not finite: which of them are applied, and which end the run."""

from __future__ import annotations

import numpy as np
import pytest

from mpitrain.errors import NonFiniteLoss
from mpitrain.strategy.non_finite import NonFinitePolicy


@pytest.mark.parametrize("loss", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    ("action", "applies", "ends"), [("stop", False, True), ("skip", False, False), ("ignore", True, False)]
)
def test_action(loss: float, action: str, applies: bool, ends: bool) -> None:
    policy = NonFinitePolicy(action, workers=3)
    assert (policy.applies(loss), policy.ends_run(loss)) == (applies, ends)
    assert policy.applies(0.5) and not policy.ends_run(0.5)
    if ends:
        with pytest.raises(NonFiniteLoss):
            policy.check(loss, np.full(3, loss), 0)
        return
    assert policy.check(loss, np.full(3, loss), 0) == policy.check_own(loss, 2, 0) == applies


def test_the_error_names_step_and_workers() -> None:
    policy = NonFinitePolicy("stop", workers=12)
    with pytest.raises(NonFiniteLoss, match=r"inf at step 1,000 on worker 7;") as caught:
        policy.check_own(np.inf, 7, 999)
    assert not caught.value.on_all_ranks
    losses = np.zeros(12)
    losses[[1, 4]] = np.nan
    with pytest.raises(NonFiniteLoss, match=r"nan at step 1 on workers 1, 4;") as caught:
        policy.check(np.nan, losses, 0)
    assert caught.value.on_all_ranks
    text = str(policy.error(np.full(12, 1e308), 0))  # each loss is finite, but their sum is not
    assert "workers 0, 1, 2, 3, 4, 5, 6, 7 ...;" in text
