"""A script with its own training loop, for the models of ``models.py``."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2]))  # imports this checkout

import mpitrain
from mpitrain import data
from tests.torch import models

# A decorated method of PyTorch's optimizers imports PyTorch's compiler, unless the method has the attribute
# ``__dynamo_disable``. The import takes longer than the rest of a run here.
for _method in filter(lambda each: hasattr(each, "__wrapped__"), vars(torch.optim.Optimizer).values()):
    setattr(_method.__wrapped__, "__dynamo_disable", _method.__wrapped__)


def make_optimizer(name: str, model: nn.Module) -> Any:
    """Return an optimizer of PyTorch, or several."""
    params = list(model.parameters())
    if name == "groups":
        groups = [
            {"params": params[:1], "lr": 0.002, "weight_decay": 0.0},
            {"params": params[1:2], "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.3},
            {"params": params[2:]},
        ]
        return torch.optim.AdamW(groups, 0.01, weight_decay=0.1)
    return {
        "adam": lambda: torch.optim.Adam(params, 0.01),
        "l2": lambda: torch.optim.Adam(params, 0.01, weight_decay=0.1),
        "nesterov": lambda: torch.optim.SGD(params, 0.05, momentum=0.9, nesterov=True),
        "rmsprop": lambda: torch.optim.RMSprop(params, 0.01, momentum=0.5),
        "nadam": lambda: torch.optim.NAdam(params, 0.01),
        "two": lambda: [torch.optim.Adam(part, 0.01) for part in (params[:1], params[1:])],
        "one parameter twice": lambda: [torch.optim.Adam(part, 0.01) for part in (params[:2], params[1:])],
        "none": list,
        "of two kinds": lambda: [torch.optim.Adam(params[:1], 0.01), mpitrain.optim.adam(0.01)],
        "a number": lambda: 0.01,
        "adafactor": lambda: torch.optim.Adafactor(params),
        "lbfgs": lambda: torch.optim.LBFGS(params),
    }[name]()


def make_scheduler(name: str, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler | None:
    """Return a scheduler of PyTorch; None if ``name`` is empty."""
    make = {
        "steps": lambda: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
        "cosine": lambda: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12),
        "plateau": lambda: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
    }
    return make[name]() if name else None


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", default="mlp")
    parser.add_argument("--optimizer", default="adam")
    parser.add_argument("--batch-size", type=int, default=6)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--dtype", default="float64")
    parser.add_argument("--mode", default="sync")
    parser.add_argument("--tensors", action="store_true")
    parser.add_argument("--in-order", action="store_true")
    parser.add_argument("--accumulate-steps", type=int, default=1)
    parser.add_argument("--normalize", default="sync")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--scheduler", default="")
    parser.add_argument("--interval", default="epoch")
    parser.add_argument("--clip-norm", type=float)
    parser.add_argument("--clip-in-loop", type=float)
    parser.add_argument("--fault", default="")
    parser.add_argument("--at", type=int, default=5)
    return parser.parse_args()


def commit(fault: str, trainer: mpitrain.Trainer, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Cause ``fault`` in the middle of an epoch, for example an exception."""
    if fault == "raise" and trainer.rank == trainer.size - 1:
        raise ArithmeticError("this worker fails")
    if fault == "kill" and trainer.rank == trainer.size - 1 and trainer.first:
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "optimizer":
        optimizer.step()
    if fault == "closure":
        optimizer.step(lambda: 0.0)
    if fault == "group":
        optimizer.param_groups.append({**optimizer.param_groups[0], "params": []})
    if fault == "amsgrad":
        optimizer.param_groups[0]["amsgrad"] = True
    if fault == "register":
        trainer.register("model", model)
    if fault == "steps":
        next(trainer.steps(5))
    if fault == "mean on one rank" and trainer.rank == 0:
        trainer.mean(1.0)
    if fault == "state":
        optimizer.load_state_dict(optimizer.state_dict())
    if fault == "exit":
        sys.exit(0)
    if fault == "stop":
        trainer.stop("enough")
    if fault == "change on one rank" and trainer.rank == 0:
        trainer.change_parameters(lambda: None)
    if fault == "change after step on one rank" and trainer.rank == 0:
        trainer.step()
        trainer.change_parameters(lambda: None)
    if fault == "replaced data":
        for parameter in model.parameters():
            parameter.data = 0.9 * parameter.data
    if fault == "unknown optimizer":
        trainer.step(torch.optim.SGD(model.parameters(), 0.1))
    if fault == "different optimizers":
        trainer.step(optimizer[trainer.rank])
    if fault == "optimizer on one rank" and trainer.rank == 0:
        trainer.step(optimizer[0])
    if fault == "step twice":
        trainer.step(optimizer[0])
        trainer.step(optimizer[0])


def load_bad_state(fault: str, optimizer: torch.optim.Optimizer, rank: int) -> None:
    """Set, before training, a state of the optimizer that mpitrain must refuse."""
    for number, parameter in enumerate(optimizer.param_groups[0]["params"]):
        means = torch.zeros(2) if fault == "other state" else torch.zeros_like(parameter)
        steps = number + 1.0 if fault == "different steps" else 1.0
        if fault == "states differ":
            means += rank
        if fault != "state on one rank" or rank == 0:
            optimizer.state[parameter] = {"step": torch.tensor(steps), "exp_avg": means, "exp_avg_sq": means.clone()}


def main() -> None:
    arguments = parse()
    if arguments.fault.endswith("bfloat16"):
        arguments.dtype = "bfloat16"
    rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", 0))
    torch.manual_seed(rank)  # the chief's initial values are used
    model = models.make(arguments.kind, arguments.normalize, arguments.dropout)
    model.to(getattr(torch, arguments.dtype))
    examples, labels = models.arrays(arguments.kind)
    dataset: object = data.from_arrays(examples, labels)
    if arguments.tensors:
        typed = torch.from_numpy(examples).to(torch.float32 if arguments.dtype == "float32" else None)
        dataset = [*zip(typed, torch.from_numpy(labels), strict=True)]
    loss_of = models.per_token if arguments.kind == "gpt" else nn.CrossEntropyLoss()
    optimizer = make_optimizer(arguments.optimizer, model)
    scheduler = make_scheduler(arguments.scheduler, optimizer)
    if arguments.fault in ("other state", "different steps", "state on one rank", "states differ", "state for servers"):
        load_bad_state(arguments.fault, optimizer, rank)
    trainer = mpitrain.Trainer(
        model,
        optimizer,
        scheduler=scheduler,
        scheduler_interval=arguments.interval,
        clip_norm=arguments.clip_norm,
        mode=arguments.mode,
        dtype="float32" if arguments.dtype == "bfloat16" else arguments.dtype,
        accumulate_steps=arguments.accumulate_steps,
        threads=1,
        log_steps=0,
    )
    loader = trainer.loader(dataset, arguments.batch_size, shuffle=not arguments.in_order)
    if arguments.fault == "ranks differ":
        optimizer.param_groups[0]["lr"] *= 1 + trainer.rank
    losses, epochs, step = [], [], 0
    alias, aliases = next(model.parameters()).data, model.state_dict()  # a slow worker may get no batch
    for epoch in trainer.epochs(arguments.epochs):
        if not epochs:
            trainer.first = trainer.step_count == 0  # not resumed
        epochs.append(epoch)
        for inputs, targets in loader:
            if arguments.fault.startswith("own update") and step == arguments.at:
                for parameter in model.parameters():
                    parameter.data.mul_(0.9)
            loss = loss_of(model(inputs.bfloat16() if arguments.dtype == "bfloat16" else inputs), targets)
            if arguments.fault == "gradient before backward" and step == arguments.at:
                sum(parameter.square().sum() for parameter in model.parameters()).backward()
            if arguments.fault != "forget":
                trainer.backward(loss)
            if arguments.fault == "gradient after backward" and step == arguments.at:
                sum(parameter.square().sum() for parameter in model.parameters()).backward()
            step += 1
            if step == arguments.at:
                commit(arguments.fault, trainer, model, optimizer)
                if arguments.fault == "break":
                    break
            if arguments.fault == "no step":
                continue
            if arguments.clip_in_loop is not None:
                nn.utils.clip_grad_norm_(model.parameters(), arguments.clip_in_loop)
            trainer.step()
            alias, aliases = next(model.parameters()).data, model.state_dict()
            losses.append(float(loss.detach()))
        if arguments.fault == "break" and step >= arguments.at:
            break
    if arguments.fault == "alias":
        assert torch.equal(alias, next(model.parameters()))
        assert all(value.isfinite().all() for value in aliases.values())
    third = max(1, len(losses) // 3)
    first, last = sum(losses[:third]) / third, sum(losses[-third:]) / third
    if arguments.scheduler:
        print(f"rate {scheduler.get_last_lr()[0]:.6f} {optimizer.param_groups[0]['lr']:.6f}", flush=True)
    if arguments.fault == "state after training":
        optimizer.state_dict()
    if arguments.fault == "second":
        second = mpitrain.Trainer(model, torch.optim.SGD(model.parameters(), 0.1))
        second.loader(dataset, arguments.batch_size)
        next(second.epochs(1))
    print(f"worker {trainer.rank}: epochs {epochs} losses {first:.4f} {last:.4f}", flush=True)


if __name__ == "__main__":
    main()
