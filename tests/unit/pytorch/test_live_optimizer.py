"""An optimizer whose options a script changes, and its schedulers, which are found whenever they are made."""

from __future__ import annotations

import copy
import inspect
import pickle
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.optim import lr_scheduler  # noqa: E402

from mpitrain.core.layout import Layout  # noqa: E402
from mpitrain.errors import CheckpointError, JobError  # noqa: E402
from mpitrain.pytorch.live_optimizer import LiveOptimizer, check_same_options, live_optimizer  # noqa: E402

from ...support.waiting import limit  # noqa: E402
from ...torch.optimizers import Counting  # noqa: E402

MODEL = nn.Linear(2, 2)


class Halving(lr_scheduler.LRScheduler):
    """A user's own scheduler, which does not call the constructor of its base class."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self, epoch: int | None = None) -> None:
        self.optimizer.param_groups[0]["lr"] /= 2


class Owner:
    """Does nothing; see ``live_optimizer.Owner``."""

    def step(self) -> None: ...
    def collect_state(self) -> None: ...
    def drop_state(self) -> None: ...
    def use_state(self) -> None: ...


def sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD(MODEL.parameters(), 0.1)


def tracked(optimizer: torch.optim.Optimizer) -> LiveOptimizer:
    return live_optimizer(optimizer, MODEL, None, None, Owner())


def found(live: LiveOptimizer) -> list[str]:
    return [name for name, _ in live.state()["schedulers"]]


def test_schedulers_are_found_but_not_their_parts() -> None:
    optimizer, other = sgd(), sgd()
    parts: list[Any] = [lr_scheduler.LinearLR(optimizer), lr_scheduler.ConstantLR(optimizer)]
    parts = [lr_scheduler.ChainedScheduler(parts), lr_scheduler.StepLR(optimizer, 1)]
    schedules: list[Any] = [lr_scheduler.SequentialLR(optimizer, parts, [2])]
    del parts
    live, live_other = tracked(optimizer), tracked(other)
    schedules += [lr_scheduler.ReduceLROnPlateau(optimizer), Halving(optimizer)]
    schedules.append(lr_scheduler.ExponentialLR(other, 0.5))
    assert found(live) == ["Halving", "ReduceLROnPlateau", "SequentialLR"]
    assert found(live_other) == ["ExponentialLR"]
    schedules.clear()
    assert found(live) == found(live_other) == []


def test_copied_and_pickled_schedulers_are_found() -> None:
    optimizer = sgd()
    first = lr_scheduler.StepLR(optimizer, 1)
    second, third = copy.copy(first), copy.copy(first)
    third.optimizer = sgd()
    assert found(tracked(optimizer)) == ["StepLR", "StepLR"] and found(tracked(third.optimizer)) == ["StepLR"]
    restored = pickle.loads(pickle.dumps(second))
    restored.optimizer = third.optimizer
    assert found(tracked(third.optimizer)) == ["StepLR", "StepLR"]


def test_classes_of_schedulers_stay_as_they_are() -> None:
    class Registered:
        def __new__(cls, *arguments: Any, **options: Any) -> Any:
            own = super().__new__(cls)
            own.arguments = arguments
            return own

    class Both(lr_scheduler.LambdaLR, Registered):  # type: ignore[misc]
        pass

    class Dict(lr_scheduler.LRScheduler, dict):  # type: ignore[type-arg]
        def get_lr(self) -> list[float]:
            return [0.1]

    optimizer = sgd()
    both, of_dict = Both(optimizer, lambda step: 1.0), Dict(optimizer)
    assert both.arguments[0] is optimizer and of_dict == {}
    assert found(tracked(optimizer)) == ["Both", "Dict"]
    assert [*inspect.signature(lr_scheduler.LRScheduler).parameters] == ["optimizer", "last_epoch"]


def test_schedulers_made_before_the_import_are_found() -> None:
    code = (
        "import torch\n"
        "model = torch.nn.Linear(2, 2)\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)\n"
        "from mpitrain.pytorch.live_optimizer import live_optimizer\n"
        "class Owner:\n"
        "    step = collect_state = drop_state = use_state = None\n"
        "print(live_optimizer(optimizer, model, None, None, Owner()).state()['schedulers'][0][0])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=limit(60))
    assert done.stdout == "StepLR\n"


@pytest.mark.filterwarnings("ignore:Detected call of")  # no optimizer takes steps here
@pytest.mark.parametrize("make", [lambda own: lr_scheduler.StepLR(own, 1, 0.5), Halving], ids=["torch", "own"])
def test_a_scheduler_continues_after_its_steps_before_a_resume(make: Any) -> None:
    def started() -> tuple[torch.optim.Optimizer, LiveOptimizer]:
        optimizer = sgd()
        return optimizer, live_optimizer(optimizer, MODEL, None, make(optimizer), Owner())

    whole, live = started()
    rates = []
    for steps in range(6):
        live.advance_scheduler(steps)
        rates.append(whole.param_groups[0]["lr"])
        if steps == 3:
            saved = copy.deepcopy(live.state())
    assert rates == [0.1 / 2**steps for steps in range(6)]
    resumed, live = started()
    live.load_state(saved)
    for steps in (3, 4, 5):
        live.advance_scheduler(steps)
        assert resumed.param_groups[0]["lr"] == rates[steps]


@pytest.mark.filterwarnings("ignore:Detected call of")  # no optimizer takes steps here
@pytest.mark.parametrize("reverse", [False, True])
def test_schedulers_of_one_class_continue_with_their_own_state(reverse: bool) -> None:
    def make(reverse: bool = False) -> tuple[LiveOptimizer, list[lr_scheduler.StepLR]]:
        optimizer = sgd()
        schedules = {gamma: lr_scheduler.StepLR(optimizer, 1, gamma) for gamma in sorted((0.5, 0.25), reverse=reverse)}
        return tracked(optimizer), [schedules[0.5], schedules[0.25]]

    live, (by_epoch, by_step) = make()
    by_epoch.step()
    for _ in range(3):
        by_step.step()
    resumed, schedules = make(reverse)
    resumed.load_state(live.state())
    assert [schedule.state_dict() for schedule in schedules] == [by_epoch.state_dict(), by_step.state_dict()]


class Recording(Owner):
    """Records the calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def step(self) -> None:
        self.calls.append("step")

    def collect_state(self) -> None:
        self.calls.append("collect")

    def drop_state(self) -> None:
        self.calls.append("drop")

    def use_state(self) -> None:
        self.calls.append("use")


def test_the_methods_of_the_optimizer_call_the_owner() -> None:
    owner, optimizer = Recording(), sgd()
    live = live_optimizer(optimizer, MODEL, None, None, owner)
    optimizer.step()
    state = optimizer.state_dict()
    optimizer.load_state_dict(state)
    assert owner.calls == ["step", "collect", "drop", "use"]
    with pytest.raises(JobError, match="closure"):
        optimizer.step(lambda: 0.0)
    assert live.is_of(optimizer) and not live.is_of(sgd()) and live.parameter_names == ["weight", "bias"]


def test_the_options_follow_the_groups() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam([{"params": [model.weight], "lr": 0.2}, {"params": [model.bias]}], 0.1)
    live = live_optimizer(optimizer, model, 2.0, None, Owner())
    rule = live.rule
    assert not live.has_changed() and [group["lr"] for group in live.options] == [0.2, 0.1]
    optimizer.param_groups[0]["lr"] = 0.7  # a rate is read at every update
    assert not live.has_changed() and rule.by_name("weight").rate(0) == 0.7
    optimizer.param_groups[1]["betas"] = (0.5, 0.6)
    assert live.has_changed() and not live.has_changed()
    assert live.rule.by_name("bias").beta1 == 0.5 and live.rule.by_name("weight").beta1 == 0.9
    assert live.rule.clip_norm == 2.0 and rule.by_name("bias").beta1 == 0.9


def test_changes_that_need_other_state_are_refused() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD([model.weight], 0.1)
    live = live_optimizer(optimizer, model, None, None, Owner())
    optimizer.param_groups[0]["momentum"] = 0.9
    with pytest.raises(JobError, match="SGD"):
        live.has_changed()
    optimizer.add_param_group({"params": [model.bias]})
    with pytest.raises(JobError, match="group"):
        live.has_changed()


@pytest.mark.parametrize("scheduler", ["StepLR", lr_scheduler.ReduceLROnPlateau(sgd())], ids=["text", "plateau"])
def test_schedulers_that_the_trainer_cannot_call(scheduler: Any) -> None:
    with pytest.raises(JobError, match=type(scheduler).__name__):
        live_optimizer(sgd(), MODEL, None, scheduler, Owner())
    with pytest.raises(JobError, match="Linear"):
        live_optimizer(MODEL, MODEL, None, None, Owner())  # type: ignore[arg-type]


@pytest.mark.filterwarnings("error:Detected call of")
def test_the_scheduler_is_called_up_to_a_number_of_steps() -> None:
    optimizer = sgd()
    scheduler = lr_scheduler.StepLR(optimizer, 1, 0.5)
    live = live_optimizer(optimizer, MODEL, None, scheduler, Owner())
    live.note_step()
    for steps in (0, 2, 2, 1, 3):
        live.advance_scheduler(steps)
    assert optimizer.param_groups[0]["lr"] == 0.1 / 8
    ends = lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=2)
    live = live_optimizer(sgd(), MODEL, None, ends, Owner())
    with pytest.raises(JobError, match=r"OneCycleLR .* 2 "):
        live.advance_scheduler(5)


@pytest.mark.filterwarnings("ignore:Detected call of")
def test_options_are_restored_unless_the_script_has_changed_them() -> None:
    def make(rate: float = 0.1, schedules: bool = False) -> tuple[torch.optim.Optimizer, LiveOptimizer, Any]:
        optimizer = torch.optim.SGD(MODEL.parameters(), rate)
        live = tracked(optimizer)
        return optimizer, live, lr_scheduler.StepLR(optimizer, 1, 0.5) if schedules else None

    optimizer, live, _ = make()
    optimizer.param_groups[0]["lr"] = 0.025
    state = copy.deepcopy(live.state())
    for rate, expected in ((0.1, 0.025), (0.3, 0.3)):
        optimizer, live, _ = make(rate)
        live.load_state(state)
        assert optimizer.param_groups[0]["lr"] == expected
    optimizer, live, scheduler = make(schedules=True)
    with pytest.raises(CheckpointError):
        live.load_state(state)
    _, live, scheduler = make(schedules=True)
    scheduler.step()
    state = copy.deepcopy(live.state())
    optimizer, live, other = make(0.3, schedules=True)
    live.load_state(state)  # a scheduler continues with the options of the checkpoint
    assert optimizer.param_groups[0]["lr"] == 0.05 and other.last_epoch == 1


def test_workers_must_have_the_same_options() -> None:
    options = [{"lr": 0.1, "betas": (0.9, 0.99)}, {"lr": 0.2}]
    check_same_options([options, copy.deepcopy(options)])
    for group, name, value in ((0, "betas", (0.9, 0.9)), (1, "lr", 0.3)):
        other = copy.deepcopy(options)
        other[group][name] = value
        with pytest.raises(JobError, match=f"{name} .* {group} .* worker 2") as error:
            check_same_options([options, options, other])
        assert error.value.on_all_ranks


def adam_with_steps(steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    for step in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, step + 1.0)
        optimizer.step()
    return model, optimizer


def test_state_that_the_script_has_loaded_must_be_the_same_on_all_workers() -> None:
    lives = [live_optimizer(*reversed(adam_with_steps(n)), None, None, Owner()) for n in (0, 2, 2, 3)]
    digests: list[Any] = []
    for live in lives:
        live.check_state(lambda digest: digests.append(digest) or [digest])
    assert not lives[0].check_state(lambda digest: [digest] * 3) and lives[1].check_state(lambda digest: [digest] * 3)
    assert digests[1] == digests[2]
    with pytest.raises(JobError, match="worker 2"):
        lives[1].check_state(lambda digest: [digest, digest, digests[3]])


def test_state_in_slots_is_shown_and_taken_back() -> None:
    model, optimizer = adam_with_steps(3)
    expected = copy.deepcopy(optimizer.state_dict()["state"])
    live = live_optimizer(optimizer, model, None, None, Owner())
    layout = Layout.pack([(name, tuple(value.shape), "param") for name, value in model.named_parameters()])
    given: list[Any] = []
    loop: Any = SimpleNamespace(
        plan=SimpleNamespace(layout=layout, dtype=np.dtype(np.float32)),
        set_slots=lambda slots, updates: given.extend((slots, updates)),
        slots=lambda: given,
    )
    live.use_state(loop)
    assert given[1] == 3 and not optimizer.state
    live.set_state(loop, None)
    for index, values in optimizer.state_dict()["state"].items():
        for key, value in values.items():
            assert torch.equal(value, expected[index][key])
    live.drop_state()
    assert not optimizer.state


def test_state_of_whole_tensors_is_gathered_from_all_workers() -> None:
    lives, models = [], []
    for own in ("weight", "bias"):
        model = nn.Linear(2, 2)
        live = live_optimizer(Counting(model.parameters(), 0.1), model, None, None, Owner())
        live.rule.begin([own], {})  # type: ignore[attr-defined]
        models.append(model)
        lives.append(live)
    for live, name, value in zip(lives, ("weight", "bias"), (3, 4), strict=True):
        live.rule.optimizer.state[live.rule.parameters[name]]["taken"] = value  # type: ignore[attr-defined]
    states = [live.rule.own_state() for live in lives]  # type: ignore[attr-defined]
    lives[0].set_state(None, lambda own: states)  # type: ignore[arg-type]
    shown = lives[0].rule.optimizer.state  # type: ignore[attr-defined]
    assert [shown[parameter]["taken"] for parameter in models[0].parameters()] == [3, 4]
    lives[0].use_state(None)  # type: ignore[arg-type]
    assert list(shown) == [models[0].weight]


def test_options_that_the_optimizer_changes_itself_are_not_those_of_the_script() -> None:
    model = nn.Linear(2, 2)
    optimizer = Counting(model.parameters(), 0.1)
    live = live_optimizer(optimizer, model, None, None, Owner())
    live.rule.begin(["weight", "bias"], {})  # type: ignore[attr-defined]
    live.rule.update_tensors({name: np.ones(p.shape, np.float32) for name, p in model.named_parameters()})  # type: ignore[attr-defined]
    assert live.options == [{"lr": 0.1, "k": 1}] and live.options_of_script == [{"lr": 0.1}]
