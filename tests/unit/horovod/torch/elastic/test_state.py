"""State that a training function commits, and restores in the same or another process."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from mpitrain.horovod.torch.elastic.state import CommitFile, TorchState  # noqa: E402


def make_state() -> TorchState:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    return TorchState(model, optimizer, step=0, seen=[])


def train(state: TorchState) -> None:
    state.optimizer.zero_grad()
    state.model(torch.ones(3, 2) * (state.step + 1)).square().mean().backward()
    state.optimizer.step()
    state.seen.append(state.step)
    state.step += 1


def contents(state: TorchState) -> tuple[object, ...]:
    momentum = [values["momentum_buffer"].tolist() for values in state.optimizer.state_dict()["state"].values()]
    return state.step, list(state.seen), [each.tolist() for each in state.model.parameters()], momentum


def test_a_commit_is_the_state_when_it_is_made(tmp_path: Path) -> None:
    state, path = make_state(), tmp_path / "folder" / "commit.pt"
    assert not state.attach(CommitFile(path, True))
    for steps in (1, 2):
        train(state)
        state.commit()
        committed = contents(state)
        assert committed[0] == steps
        other = make_state()  # of another process
        assert other.attach(CommitFile(path, True))
        assert contents(other) == committed
    train(state)
    assert contents(state) != committed
    state.restore()
    assert contents(state) == committed
    train(state)
    state.restore()
    assert contents(state) == committed, "what was restored is a copy"


def test_other_ranks_neither_write_nor_read(tmp_path: Path) -> None:
    state, path = make_state(), tmp_path / "commit.pt"
    assert not state.attach(CommitFile(path, False))
    state.step = 5
    state.commit()
    assert not path.exists()
    first = make_state()
    first.attach(CommitFile(path, True))
    first.commit()
    assert path.exists() and not state.attach(CommitFile(path, False))
    assert state.step == 5
