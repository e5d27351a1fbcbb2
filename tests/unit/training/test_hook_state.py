"""The state of hooks in checkpoints."""

from __future__ import annotations

from typing import Any

import pytest

from mpitrain import Hook
from mpitrain.core.extra_state import Versioned
from mpitrain.errors import CheckpointError, JobError
from mpitrain.training.hook_state import HookState


class Best(Hook):
    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state["state"]


class Other(Best):
    pass


def test_each_hook_gets_its_own_state_back() -> None:
    saved = HookState([Hook(), Best(0.5), Other([1, "x"]), Best({"a": None})]).extra_state()
    restored = [Best(None), Best(None), Hook(), Other(None), Other("not saved")]
    HookState(restored).load_extra_state({"other": Versioned(1, {"value": 1.0}), **saved})
    assert [hook.state for hook in restored if isinstance(hook, Best)] == [0.5, {"a": None}, [1, "x"], "not saved"]
    HookState(restored).load_extra_state({})
    assert HookState([Hook()]).extra_state() == {}


@pytest.mark.parametrize("state", [object(), "x" * 40_000])
def test_state_that_cannot_be_saved_is_refused(state: object) -> None:
    with pytest.raises(JobError):
        HookState([Best(state)]).extra_state()


@pytest.mark.parametrize("text", ["", "5", "[5]", "[[1, 2, 3]]", "{", "[" * 30_000])
def test_malformed_state_is_refused(text: str) -> None:
    with pytest.raises(CheckpointError):
        HookState([Best(None)]).load_extra_state({"hooks": Versioned(1, {"states": text})})
