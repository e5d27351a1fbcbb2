"""Consistent points that hooks and options request, with their reasons."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mpitrain import checkpoint

from ..support.launch import ROOT
from ..support.world.controller import World

# Requests consistent points with a reason, one of them while another point is handled, and records all points.
JOB = """
import json
import os
import time

from mpitrain import Hook, Job, data, nn, optim


class Pause(Hook):
    def begin(self, loop):
        self.seen, self.requested = [], False

    def after_step(self, loop):
        if loop.step >= 3 and not self.requested:
            self.requested = True
            loop.request_pause("mine")
            if loop.cluster.chief:
                open(self.path("requested"), "w").close()
            is_last = loop.cluster.task_index == loop.cluster.workers.size - 1
            while is_last and not os.path.exists(self.path("requested")):
                time.sleep(0.01)  # otherwise, other workers might train to the end before the chief has begun
        if loop.step == loop.train_steps:
            loop.request_pause("end")

    def at_consistent_point(self, loop, point):
        if point.reasons:
            self.seen.append([point.step, sorted(point.reasons)])
        if "mine" in point.reasons:
            loop.request_pause("next")

    def end(self, loop):
        with open(self.path(f"{loop.cluster.rank}.json"), "w") as file:
            json.dump(self.seen, file)

    @staticmethod
    def path(name):
        return os.path.join(os.environ["SEEN"], name)


def job():
    images = data.mnist(None)
    model = nn.Sequential(nn.Dense(images.features, 10))
    how = {"optimizer": optim.adam(0.001), "batch_size": 32, "train_steps": 40, "hooks": [Pause()]}
    return Job(model=model, loss=nn.SoftmaxCrossEntropy(), train=images.train, **how)
"""


def seen(folder: Path) -> list[list[list[object]]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


@pytest.mark.parametrize(
    ("n", "flags"),
    [
        (2, ()),
        (2, ("--mode", "local", "--local-steps", "4")),
        pytest.param(2, ("--mode", "async"), marks=pytest.mark.quick),
        (3, ("--mode", "ssp", "--ps", "1", "--no-shared-memory")),
        (3, ("--mode", "backup")),
    ],
    ids=str,
)
def test_a_hook_requests_points_with_a_reason(
    each_world: World, tmp_path: Path, n: int, flags: tuple[str, ...]
) -> None:
    (tmp_path / "pausing.py").write_text(JOB)
    words = [tmp_path / "pausing.py", "--run-dir", tmp_path / "run", *flags]
    each_world.train(n, *words, env={"SEEN": str(tmp_path)})
    first, *others = seen(tmp_path)
    assert [reasons for _, reasons in first[:2]] == [["mine"], ["next"]]
    assert 3 <= first[0][0] < first[1][0] < 40
    if "--mode" not in flags or "local" in flags:  # in other modes another worker may take the last step
        assert first[2:] == [[40, ["end"]]]
    assert all(other == first for other in others) and len(others) == (1 if n == 2 or "--ps" in flags else 2)
    assert [*checkpoint.steps(tmp_path / "run" / "checkpoints")] == [40], "a point of another reason does not save"


@pytest.mark.parametrize("flags", [(), ("--mode", "async")], ids=str)
def test_validation_by_time_does_not_save(world: World, tmp_path: Path, flags: tuple[str, ...]) -> None:
    words = [ROOT / "jobs" / "mnist_mlp.py", "--run-dir", tmp_path, "--train-steps", "4000", *flags]
    world.train(2, *words, "--validate-steps", "0", "--validate-secs", "0.2")
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    validated = [line["step"] for line in lines if "validation_loss" in line]
    assert len(validated) > 1 and validated[-1] == 4000 and len(set(validated)) == len(validated)
    assert [*checkpoint.steps(tmp_path / "checkpoints")] == [4000]
