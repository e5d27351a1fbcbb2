"""Training loops that run with a Trainer on several ranks, and with plain PyTorch on whole batches.

As a script, this file runs all loops, or the named loops, with a Trainer, and stores the chief's parameters and
buffers.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import ExponentialLR, OneCycleLR, ReduceLROnPlateau

sys.path.insert(0, str(Path(__file__).parents[2]))  # imports this checkout

import mpitrain
from mpitrain.data.permutation import order
from mpitrain.errors import JobError
from tests.torch.optimizers import Counting, GlobalNorm, HalfAdam, RowNorm, muon_and_adamw, two_adams
from tests.torch.own_loop import make_optimizer

SEED, EXAMPLES, TOTAL, EPOCHS = 0, 48, 12, 3


def make_data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(EXAMPLES, 5, generator=generator, dtype=torch.float64)
    return inputs, (inputs @ torch.randn(5, 3, generator=generator, dtype=torch.float64)).argmax(1)


def make_model() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()


class Tools(NamedTuple):
    """The objects that a loop uses: those of a Trainer, or of plain PyTorch."""

    model: nn.Module
    epochs: Callable[[int], Iterator[int]]
    batches: Any
    backward: Callable[..., object]
    mean: Callable[[Any], float]
    no_sync: Callable[[], Any]
    change: Callable[[Callable[[], object]], object]
    chief: bool


class RunningMean(nn.Module):
    """Tracks the mean of its inputs in a buffer, whose average over workers is that of the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.2)
        return x


def with_buffer() -> nn.Module:
    return nn.Sequential(*make_model()[:2], RunningMean(), make_model()[2])


class Loop(NamedTuple):
    """A loop, and the functions that make its optimizer and model."""

    train: Callable[[Tools, Any], object]
    make: Callable[[nn.Module], Any] = lambda model: torch.optim.Adam(model.parameters(), 0.02)
    model: Callable[[], nn.Module] = make_model


def loss_of(tools: Tools, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(tools.model(inputs), labels)


def clip(tools: Tools, optimizer: torch.optim.Optimizer) -> None:
    for _ in tools.epochs(EPOCHS):
        for inputs, labels in tools.batches:
            optimizer.zero_grad()
            tools.backward(loss_of(tools, inputs, labels))
            nn.utils.clip_grad_norm_(tools.model.parameters(), 0.05)
            optimizer.step()


def penalty(tools: Tools, optimizer: torch.optim.Optimizer) -> None:
    for _ in tools.epochs(EPOCHS):
        for inputs, labels in tools.batches:
            optimizer.zero_grad(set_to_none=False)
            tools.backward(loss_of(tools, inputs, labels))
            for parameter in tools.model.parameters():
                assert parameter.grad is not None
                parameter.grad = parameter.grad.sign() + 0.1 * parameter.detach()
            optimizer.step()


def two_losses(tools: Tools, optimizer: torch.optim.Optimizer) -> None:
    for _ in tools.epochs(EPOCHS):
        for inputs, labels in tools.batches:
            optimizer.zero_grad()
            tools.backward(loss_of(tools, inputs, labels))
            norm = sum(float(parameter.grad.norm()) for parameter in tools.model.parameters())  # type: ignore[union-attr]
            tools.backward(norm * tools.model(inputs).square().mean())
            optimizer.step()


def accumulate(tools: Tools, optimizer: torch.optim.Optimizer) -> None:
    schedule = ExponentialLR(optimizer, 0.5)
    for _ in tools.epochs(EPOCHS):
        for index, (inputs, labels) in enumerate(tools.batches):
            tools.backward(loss_of(tools, inputs, labels) / 2)
            if index % 2:
                optimizer.step()
                optimizer.zero_grad()
        schedule.step()


def unsynchronized(tools: Tools, optimizer: torch.optim.Optimizer) -> None:
    """Accumulate the gradients of two batches, of which only the last is averaged; and two passes over that batch."""
    for _ in tools.epochs(EPOCHS):
        for index, (inputs, labels) in enumerate(tools.batches):
            if index % 2 == 0:
                with tools.no_sync():
                    tools.backward(loss_of(tools, inputs, labels) / 2)
                continue
            tools.backward(loss_of(tools, inputs, labels) / 4)
            tools.backward(loss_of(tools, inputs, labels) / 4)
            nn.utils.clip_grad_norm_(tools.model.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad()


def never_synchronized(tools: Tools, optimizer: torch.optim.Optimizer) -> None:
    """Let ``step`` average: no backward pass does."""
    for _ in tools.epochs(EPOCHS):
        for inputs, labels in tools.batches:
            with tools.no_sync():
                tools.backward(loss_of(tools, inputs, labels) / 2)
                tools.backward(loss_of(tools, inputs, labels) / 2)
            optimizer.step()
            optimizer.zero_grad()


def looked_at(tools: Tools, optimizer: torch.optim.Optimizer) -> None:
    """Look at gradients on one rank only: local ones, averages, and after the step."""
    first = next(tools.model.parameters())
    for _ in tools.epochs(EPOCHS):
        for inputs, labels in tools.batches:
            with tools.no_sync():
                tools.backward(loss_of(tools, inputs, labels) / 2)
                if tools.chief:
                    assert first.grad is not None and first.grad.norm() > 0
                tools.backward(loss_of(tools, inputs, labels) / 4)
            tools.backward(loss_of(tools, inputs, labels) / 4)
            if tools.chief:
                first.grad.norm()
            optimizer.step()
            if not tools.chief:
                assert first.grad.norm() > 0
            optimizer.zero_grad()


def frozen(tools: Tools, optimizer: torch.optim.Optimizer) -> None:
    """Freeze and unfreeze the first layer within epochs."""
    for _ in tools.epochs(EPOCHS):
        for index, (inputs, labels) in enumerate(tools.batches):
            tools.model[0].requires_grad_(index >= 2)  # type: ignore[index]
            optimizer.zero_grad()
            tools.backward(loss_of(tools, inputs, labels))
            optimizer.step()


def once_unsynchronized(tools: Tools, optimizer: torch.optim.Optimizer) -> None:
    for _ in tools.epochs(EPOCHS):
        for inputs, labels in tools.batches:
            with tools.no_sync():
                tools.backward(loss_of(tools, inputs, labels))
            optimizer.step()
            optimizer.zero_grad()


def descending(tools: Tools, optimizer: torch.optim.Optimizer) -> None:
    """Update without the optimizer."""

    def descend() -> None:
        for parameter in tools.model.parameters():
            parameter.data.add_(parameter.grad, alpha=-0.1)

    for _ in tools.epochs(EPOCHS):
        for inputs, labels in tools.batches:
            optimizer.zero_grad()
            tools.backward(loss_of(tools, inputs, labels))
            tools.change(descend)


def noise(tools: Tools, optimizer: torch.optim.Optimizer) -> None:
    """Add the same noise to the gradients on all ranks, and read parameters between backward and step."""
    generator = torch.Generator().manual_seed(3)
    for _ in tools.epochs(EPOCHS):
        for inputs, labels in tools.batches:
            tools.backward(loss_of(tools, inputs, labels))
            for parameter in tools.model.parameters():
                assert parameter.grad is not None
                parameter.grad.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64), alpha=0.01)
                parameter.grad.add_(parameter.detach(), alpha=0.1)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)


def gradient_penalty(tools: Tools, optimizer: torch.optim.Optimizer) -> None:
    """Add the squared norm of the gradient with respect to the inputs to the loss."""
    for _ in tools.epochs(EPOCHS):
        for inputs, labels in tools.batches:
            inputs = inputs.clone().requires_grad_()
            outputs = tools.model(inputs)
            (slopes,) = torch.autograd.grad(outputs.square().sum(), inputs, create_graph=True)
            tools.backward(nn.functional.cross_entropy(outputs, labels) + slopes.square().sum(1).mean())
            optimizer.step()
            optimizer.zero_grad()


def scaler(tools: Tools, optimizer: torch.optim.Optimizer) -> None:
    grad_scaler, number = torch.amp.GradScaler("cpu", growth_interval=2), 0
    for _ in tools.epochs(EPOCHS):
        for inputs, labels in tools.batches:
            optimizer.zero_grad()
            tools.backward(grad_scaler.scale(loss_of(tools, inputs, labels)))
            if number == 4:  # an overflow: this step is skipped
                first = next(tools.model.parameters())
                assert first.grad is not None
                first.grad[0] = torch.inf
            grad_scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(tools.model.parameters(), 0.5)
            grad_scaler.step(optimizer)
            grad_scaler.update()
            number += 1


def rates(tools: Tools, optimizer: torch.optim.Optimizer) -> None:
    number = 0
    for _ in tools.epochs(EPOCHS):
        for inputs, labels in tools.batches:
            for index, group in enumerate(optimizer.param_groups):
                group["lr"] = 0.05 / (1 + number + index)
                group["betas"] = (0.9 - 0.01 * number, 0.999)
            optimizer.zero_grad()
            tools.backward(loss_of(tools, inputs, labels))
            optimizer.step()
            number += 1


def scheduled(make_schedule: Callable[[torch.optim.Optimizer], Any]) -> Callable[..., None]:
    """Return a loop that calls a scheduler after each step."""

    def train(tools: Tools, optimizer: torch.optim.Optimizer) -> None:
        schedule = make_schedule(optimizer)
        for _ in tools.epochs(EPOCHS):
            for inputs, labels in tools.batches:
                optimizer.zero_grad()
                tools.backward(loss_of(tools, inputs, labels))
                optimizer.step()
                schedule.step()

    return train


def plateau(tools: Tools, optimizer: torch.optim.Optimizer) -> None:
    schedule = ReduceLROnPlateau(optimizer, patience=0, threshold=0.2)
    for _ in tools.epochs(EPOCHS):
        total = 0.0
        for inputs, labels in tools.batches:
            loss = loss_of(tools, inputs, labels)
            tools.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            total += tools.mean(loss.detach())
        schedule.step(total)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def plainly(tools: Tools, optimizer: torch.optim.Optimizer) -> None:
    for _ in tools.epochs(EPOCHS):
        for inputs, labels in tools.batches:
            optimizer.zero_grad()
            tools.backward(loss_of(tools, inputs, labels))
            optimizer.step()


def restored(tools: Tools, optimizer: torch.optim.Optimizer) -> None:
    state: Any = None
    for _ in tools.epochs(EPOCHS):
        for inputs, labels in tools.batches:
            tools.backward(loss_of(tools, inputs, labels))
            optimizer.step()
            optimizer.zero_grad()
        if state is None:
            state = copy.deepcopy(optimizer.state_dict())
        else:
            optimizer.load_state_dict(copy.deepcopy(state))


def adversarial(tools: Tools, optimizers: list[torch.optim.Optimizer]) -> None:
    """Train the first layer as a generator, and the last layer as its discriminator."""
    (generator, activation, discriminator), (of_generator, of_discriminator) = tools.model, optimizers
    schedule, number = ExponentialLR(of_discriminator, 0.8), 0
    criterion = nn.functional.cross_entropy
    for _ in tools.epochs(EPOCHS):
        for inputs, labels in tools.batches:
            discriminator.zero_grad()
            real, fake = nn.functional.pad(inputs, (0, 3)), activation(generator(inputs))
            tools.backward(criterion(discriminator(real), labels), of_discriminator)
            tools.backward(criterion(discriminator(fake.detach()), 2 - labels), of_discriminator)
            of_discriminator.step()
            generator.zero_grad()
            tools.backward(criterion(discriminator(fake), labels), of_generator)
            nn.utils.clip_grad_norm_(generator.parameters(), 0.05)
            assert all(parameter.grad.norm() > 0 for parameter in discriminator.parameters())
            of_generator.step()
            number += 1
            if number == 4:
                saved = copy.deepcopy(of_generator.state_dict())
            if number == 6:
                of_generator.load_state_dict(saved)
        schedule.step()


def alternating(tools: Tools, optimizers: list[torch.optim.Optimizer]) -> None:
    """Update the first layer after every second step, with the gradients of both steps added up."""
    (generator, *_), (of_generator, of_rest) = tools.model, optimizers
    for _ in tools.epochs(EPOCHS):
        for index, (inputs, labels) in enumerate(tools.batches):
            of_rest.zero_grad()
            tools.backward(loss_of(tools, inputs, labels))
            of_rest.step()
            if index % 2:
                of_generator.step()
                generator.zero_grad()


def by_hand(tools: Tools, optimizer: torch.optim.Optimizer) -> None:
    """Update parameters without the optimizer in every second step; scale and clip them in every step."""

    def descend() -> None:
        for parameter in tools.model.parameters():
            parameter.data.add_(parameter.grad, alpha=-0.1)

    def clamp() -> None:
        for parameter in tools.model.parameters():
            parameter.data.mul_(0.99).clamp_(-0.3, 0.3)

    for _ in tools.epochs(EPOCHS):
        for index, (inputs, labels) in enumerate(tools.batches):
            optimizer.zero_grad()
            tools.backward(loss_of(tools, inputs, labels))
            if index % 2:
                optimizer.step()
            else:
                tools.change(descend)
            tools.change(clamp)


def both(tools: Tools, optimizers: list[torch.optim.Optimizer]) -> None:
    schedules = [ExponentialLR(optimizer, 0.8) for optimizer in optimizers]
    for _ in tools.epochs(EPOCHS):
        for inputs, labels in tools.batches:
            tools.backward(loss_of(tools, inputs, labels))
            for optimizer, schedule in zip(optimizers, schedules, strict=True):
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()


def together(tools: Tools, optimizers: list[torch.optim.Optimizer]) -> None:
    for _ in tools.epochs(EPOCHS):
        for inputs, labels in tools.batches:
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=False)
            tools.backward(loss_of(tools, inputs, labels))
            for optimizer in optimizers:
                optimizer.step()


def used(make: Callable[[nn.Module], torch.optim.Optimizer]) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """Return a function that makes an optimizer with the state of three steps."""

    def made(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = make(model)
        for number in range(3):
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, 0.1 + number)
            optimizer.step()
        optimizer.zero_grad()
        loaded = make(model)
        loaded.load_state_dict(optimizer.state_dict())
        return loaded

    return made


LOOPS = {
    "adversarial": Loop(adversarial, two_adams),
    "by hand": Loop(by_hand, lambda model: torch.optim.Adam(model.parameters(), 0.02)),
    "alternating": Loop(alternating, two_adams),
    "together": Loop(together, two_adams),
    "muon and adamw": Loop(both, muon_and_adamw),
    "global norm": Loop(restored, lambda model: GlobalNorm(model.parameters(), 0.05)),
    "adafactor": Loop(clip, lambda model: torch.optim.Adafactor(model.parameters(), 0.05)),
    "muon": Loop(plainly, lambda model: torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], 0.05)),
    "half adam": Loop(plainly, lambda model: HalfAdam(model.parameters(), 0.05)),
    "counting": Loop(
        scheduled(lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)),
        lambda model: Counting(model.parameters(), 0.5),
    ),
    "row norm": Loop(
        scheduled(lambda optimizer: ExponentialLR(optimizer, 0.9)),
        lambda model: RowNorm([{"params": [p]} for p in model.parameters()], 0.05),
    ),
    "unsynchronized": Loop(unsynchronized),
    "never synchronized": Loop(never_synchronized),
    "buffer": Loop(clip, model=with_buffer),
    "buffer, never synchronized": Loop(once_unsynchronized, model=with_buffer),
    "buffer, by hand": Loop(descending, model=with_buffer),
    "noise": Loop(noise),
    "looked at": Loop(looked_at),
    "frozen": Loop(frozen, lambda model: torch.optim.SGD(model.parameters(), 0.1)),
    "gradient penalty": Loop(gradient_penalty),
    "clip": Loop(clip),
    "penalty": Loop(penalty, momentum),
    "two losses": Loop(two_losses),
    "accumulate": Loop(accumulate, lambda model: torch.optim.NAdam(model.parameters(), 0.02)),
    "scaler": Loop(scaler, lambda model: torch.optim.Adam(model.parameters(), 0.02, fused=True)),
    "used": Loop(plainly, used(lambda model: make_optimizer("groups", model))),
    "restored adam": Loop(restored, used(lambda model: make_optimizer("groups", model))),
    "restored momentum": Loop(restored, used(momentum)),
    "restored asgd": Loop(restored, used(lambda model: torch.optim.ASGD(model.parameters(), 0.05, t0=5))),
    "restored adafactor": Loop(restored, used(lambda model: torch.optim.Adafactor(model.parameters(), 0.05))),
    "rates": Loop(rates, lambda model: make_optimizer("groups", model)),
    "one cycle": Loop(scheduled(lambda optimizer: OneCycleLR(optimizer, 0.1, EPOCHS * EXAMPLES // TOTAL)), momentum),
    "server rates": Loop(
        scheduled(lambda optimizer: ExponentialLR(optimizer, 0.8)), lambda model: make_optimizer("groups", model)
    ),
    "plateau": Loop(plateau, lambda model: torch.optim.RMSprop(model.parameters(), 0.05)),
}


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "multiplicative": lambda optimizer: lr_scheduler.MultiplicativeLR(optimizer, lambda step: 0.9 + 0.01 * step),
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 3, 0.5),
    "multi step": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [2, 5], 0.5),
    "constant": lambda optimizer: lr_scheduler.ConstantLR(optimizer, 0.5, 4),
    "linear": lambda optimizer: lr_scheduler.LinearLR(optimizer, 0.2, 1.0, 6),
    "exponential": lambda optimizer: ExponentialLR(optimizer, 0.9),
    "sequential": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 3), ExponentialLR(optimizer, 0.8)], [3]
    ),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 8),
    "chained": lambda optimizer: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(optimizer, 0.5, 3), ExponentialLR(optimizer, 0.9)]
    ),
    "cyclic": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.001, 0.05, 3, cycle_momentum=False),
    "restarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3),
    "one cycle": lambda optimizer: OneCycleLR(optimizer, 0.1, 20, cycle_momentum=False),
    "polynomial": lambda optimizer: lr_scheduler.PolynomialLR(optimizer, 9, 2.0),
}
OPTIMIZERS = ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
# Each scheduler with one of torch's optimizers.
PAIRS = {
    f"{kind} with {scheduler}": Loop(
        scheduled(SCHEDULERS[scheduler]), lambda model, kind=kind: getattr(torch.optim, kind)(model.parameters(), 0.02)
    )
    for kind, scheduler in zip([*OPTIMIZERS, "Adafactor", "NAdam", "SGD"], SCHEDULERS, strict=True)
}
LOOPS |= PAIRS


def plain(name: str) -> list[np.ndarray]:
    """Run a loop with plain PyTorch on whole batches, in the order of mpitrain; return the parameters."""
    inputs, labels = make_data()
    epoch = 0

    def epochs(count: int) -> Iterator[int]:
        nonlocal epoch
        while epoch < count:
            yield epoch
            epoch += 1

    class Batches:
        def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
            for start in range(epoch * EXAMPLES, (epoch + 1) * EXAMPLES, TOTAL):
                chosen = order(start, TOTAL, EXAMPLES, SEED, None)
                yield inputs[chosen], labels[chosen]

    model = LOOPS[name].model()
    optimizer = LOOPS[name].make(model)
    LOOPS[name].train(
        Tools(
            model,
            epochs,
            Batches(),
            lambda loss, *_: loss.backward(),
            float,
            contextlib.nullcontext,
            lambda function: function(),
            chief=True,
        ),
        optimizer,
    )
    return [value.numpy() for value in model.state_dict().values()]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("names", nargs="*", default=list(LOOPS))
    parser.add_argument("--mode", default="sync")
    parser.add_argument("--kill-at", type=int)
    parser.add_argument("--fail-at", type=int)
    parser.add_argument("--accumulate-steps", type=int, default=1)
    arguments = parser.parse_args()
    killed = arguments.out / "killed"
    for name in arguments.names:
        model = LOOPS[name].model()
        optimizer = LOOPS[name].make(model)
        options = {"run_dir": arguments.out / name, "dtype": "float64", "threads": 1, "log_steps": 0, "save_steps": 4}
        options["accumulate_steps"] = arguments.accumulate_steps
        trainer = mpitrain.Trainer(model, optimizer, mode=arguments.mode, seed=SEED, **options)

        def backward(loss: torch.Tensor, *optimizer: Any, trainer: mpitrain.Trainer = trainer) -> None:
            if arguments.kill_at == trainer.step_count and trainer.rank == trainer.size - 1 and not killed.exists():
                killed.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            if arguments.fail_at == trainer.step_count:
                raise JobError("all ranks fail", on_all_ranks=True)
            trainer.backward(loss, *optimizer)

        batches = trainer.loader([*zip(*make_data(), strict=True)], TOTAL // trainer.size // arguments.accumulate_steps)
        LOOPS[name].train(
            Tools(
                model,
                trainer.epochs,
                batches,
                backward,
                trainer.mean,
                trainer.no_sync,
                trainer.change_parameters,
                trainer.chief,
            ),
            optimizer,
        )
        if trainer.chief:
            np.savez(arguments.out / f"{name}.npz", *(value.numpy() for value in model.state_dict().values()))


if __name__ == "__main__":
    main()
