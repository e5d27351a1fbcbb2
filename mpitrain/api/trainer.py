"""``Trainer``: averaging, parameter servers and checkpoints for a training loop of the user's own."""

from __future__ import annotations

import contextlib
import math
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .. import checkpoint, optim
from ..data.batch import Batch
from ..data.split import DescribedSplit, Examples, Split
from ..errors import CheckpointError, ConfigError, JobError, UserError
from ..inference.model import load
from ..monitor.trace import span
from ..plan.config import RunConfig
from ..plan.job import Job
from ..plan.options import run_config
from ..process.signals import STOPPED_EARLY
from ..pytorch.batches import CollatedBatch, as_split
from ..pytorch.network import LossInLoop
from ..pytorch.torch_rule import options_of
from ..pytorch.translation import translated
from ..training.hooks import SAVE
from ..training.rank import Rank
from ..training.session import TrainRequest, given_run_dir, training_session
from ..training.stepped_loop import SteppedLoop
from .train import script_path

_WAIT = span("wait")
_ELSEWHERE = {  # options of a run that a Trainer gets in another way
    "batch_size": "pass it to trainer.loader",
    "train_steps": "pass the number of epochs to trainer.epochs",
    "precision": "use torch.autocast in the loop",
    "devices_per_rank": "start one rank for each device",
    "init_from": "load the values into the model before making the Trainer",
    "validate_steps": "validate in the loop",
    "validate_secs": "validate in the loop",
}
_POLL_S = 0.001


class Trainer:
    """Trains a PyTorch module in a loop of the user's own, on all ranks that run the script.

    ::

        trainer = mpitrain.Trainer(model, optimizer, mode="sync")
        loader = trainer.loader(dataset, batch_size=32)
        for epoch in trainer.epochs(10):
            for inputs, labels in loader:
                loss = loss_of(model(inputs), labels)
                trainer.backward(loss)
                trainer.step()

    Construction is collective over all ranks. With parameter servers, it does not return on their ranks: it serves
    until the workers have ended, and then exits the process, as TensorFlow's ``server.join()`` did.

    Flags before the script in ``mpitrain run FLAGS script.py`` replace ``mode`` and ``options``.

    Args:
        model: Used unmodified. All ranks begin with the chief's parameters and buffers.
        optimizer: One of ``torch.optim`` except LBFGS, Adafactor, Muon and SparseAdam, whose ``step`` is not called; or
            one of ``mpitrain.optim``. The ranks of a node share its work and its state.
        scheduler: A learning-rate scheduler of the optimizer, or None. Its ``step`` is not called.
        scheduler_interval: Whether the scheduler counts epochs or steps.
        clip_norm: Maximum Euclidean norm of the averaged gradient.
        mode: How workers agree on the parameters.
        options: The flags of ``mpitrain train``, such as ``ps=1, run_dir="runs/first", save_secs=600``.

    Attributes:
        model: As given.
        rank, size: Index of this worker, and the number of workers.
        chief: Whether this is the worker that prints and writes files.

    Raises:
        UserError: On a single rank without a launcher: an argument is not valid. Otherwise the error is printed, and
            all ranks exit. This applies to all methods.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | optim.Optimizer,
        *,
        scheduler: Any = None,
        scheduler_interval: Literal["epoch", "step"] = "epoch",
        clip_norm: float | None = None,
        mode: str = "sync",
        **options: Any,
    ) -> None:
        self.model = model
        self._loader: TrainLoader | None = None
        self._loop: SteppedLoop | None = None  # while it trains
        self._epoch: int | None = None  # that trains
        self._examples = self._last = 0  # examples of an epoch; the last epoch
        self._has_more = False  # whether this epoch has batches that the loop has not used
        self._torch_optimizer: torch.optim.Optimizer | None = None
        self._scheduler = scheduler
        caller = sys._getframe(1)
        self._source = caller.f_code.co_filename, caller.f_lineno  # for errors
        self._rank = rank = Rank.of_script()
        with rank.errors_end_the_run():
            with rank.cluster.agree("reading the options"):
                self._config = run_config({"mode": mode, **options, **rank.options})
                for name, instead in _ELSEWHERE.items():
                    if name in options or name in rank.options:
                        raise ConfigError(f"{name} is no option of a Trainer: {instead}")
                if isinstance(optimizer, optim.Optimizer):
                    if scheduler is not None or clip_norm is not None:
                        raise JobError("scheduler and clip_norm are options of the optimizers of mpitrain.optim")
                    self._optimizer = optimizer
                else:
                    self._optimizer = translated(optimizer, model, scheduler, scheduler_interval, clip_norm)
                    optimizer.register_step_pre_hook(_refuse_step)
                    optimizer.register_load_state_dict_pre_hook(_refuse_state)
                    optimizer.register_state_dict_pre_hook(_warn_of_state)
                    self._torch_optimizer = optimizer
                    self._rates = [group["lr"] for group in optimizer.param_groups]
                    self._options = [options_of(group) for group in optimizer.param_groups]
            rank.cluster.assign(self._config)
            self.rank, self.size = rank.cluster.task_index, len(rank.cluster.worker_ranks)
            self.chief = rank.cluster.chief
            _use_values_of_chief(model, rank)
            if rank.cluster.is_server:
                self._serve()

    @property
    def step_count(self) -> int:
        """Number of completed steps; over all workers in modes with servers."""
        return 0 if self._loop is None else self._loop.step

    @property
    def device(self) -> torch.device:
        """The device of the model's parameters."""
        return next(self.model.parameters()).device

    def loader(self, dataset: Examples | Split, batch_size: int) -> TrainLoader:
        """Return what takes the place of ``DataLoader`` and ``DistributedSampler`` for the training examples.

        Iterating yields this worker's batches of one epoch, on the model's device; each example of an epoch is in the
        batch of one worker. Call it once.

        Args:
            dataset: A ``torch.utils.data.Dataset``, any object with ``__len__`` and ``__getitem__``, or a split of
                ``mpitrain.data``. Examples are collated by ``default_collate``.
            batch_size: Examples of this worker in one backward pass.
        """
        with self._rank.errors_end_the_run():
            if self._loader is not None:
                raise JobError("trainer.loader was called twice: a Trainer has one loader of training examples")
            if hasattr(dataset, "__len__") and len(dataset) == 0:
                raise JobError("trainer.loader got a dataset without examples: must have at least one")
            split = as_split(dataset)
            if not isinstance(split, Split):
                raise JobError(f"trainer.loader got {type(dataset).__name__}: must be a dataset, with __len__")
            self._loader = TrainLoader(self, split, batch_size)
            return self._loader

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the epochs to train, from 0, or from the epoch in which a resumed run has stopped, to ``count - 1``.

        Training begins with the first and ends after the last one: the run then has saved a checkpoint. If a signal or
        a time limit stops the run, it saves, and the script exits with status 75. Collective over the workers.

        To finish earlier, call ``stop``; do not leave the loop with ``break``.
        """
        loop = self._open(count)
        while loop is not None and loop.take() is not None:
            self._epoch = loop.data_cursor // self._examples if self._epoch is None else self._epoch + 1
            self._has_more = True
            yield self._epoch
            with self._rank.errors_end_the_run():
                if self._has_more and loop.stop_reason is None:
                    raise JobError(
                        f"the loop has left epoch {self._epoch} before its last batch: use all batches of the loader; "
                        "to finish training early, call trainer.stop() in place of break"
                    )
        self._close()

    def backward(self, loss: Tensor) -> None:
        """Compute the gradient of the loss, and average it with the other workers' as it becomes complete.

        Takes the place of ``optimizer.zero_grad()`` and ``loss.backward()``.

        Args:
            loss: The mean over the batch.
        """
        self._require_loop().backward(loss)

    def step(self) -> None:
        """Update the parameters, in place of ``optimizer.step()``. Collective over the workers if they take the same
        steps."""
        loop = self._require_loop()
        if self._torch_optimizer is not None:
            self._check_options(self._torch_optimizer)
        loop.finish()
        if self._torch_optimizer is not None and self._scheduler is not None:
            self._show_rates(self._torch_optimizer, loop.learning_rate)

    def _check_options(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse options that the script has changed: servers and other workers do not know them."""
        if len(optimizer.param_groups) != len(self._options):
            raise JobError("a parameter group was added to the optimizer: add it before making the Trainer")
        for index, group in enumerate(optimizer.param_groups):
            rate, options = self._rates[index], self._options[index]
            if self._scheduler is None and group["lr"] != rate:
                raise JobError(
                    f"the learning rate in the optimizer was changed from {rate:g} to {float(group['lr']):g}: pass the "
                    "scheduler that changes it, as in Trainer(model, optimizer, scheduler=scheduler)"
                )
            for name, value in options.items():
                if group[name] != value:
                    raise JobError(
                        f"the option {name} of the optimizer's parameter group {index} was changed from {value!r} to "
                        f"{group[name]!r}: set it before making the Trainer"
                    )

    def _show_rates(self, optimizer: torch.optim.Optimizer, rate: float) -> None:
        """Set the rates of the last step in torch's optimizer and scheduler, where scripts read them."""
        shown = [rate * initial / self._rates[0] if self._rates[0] else rate for initial in self._rates]
        for group, group_rate in zip(optimizer.param_groups, shown, strict=True):
            group["lr"] = group_rate
        self._scheduler._last_lr = shown

    def save(self) -> None:
        """Request a checkpoint; it is written as soon as all workers hold the same parameters. Local.

        It is enough if the chief calls it.
        """
        self._require_loop().request_pause(SAVE)

    def stop(self, reason: str = "requested by the script") -> None:
        """Finish training early: all workers stop after a step that they have begun. Local; one rank is enough."""
        self._require_loop().stop(reason)

    def mean(self, value: float | Tensor) -> float:
        """Return the mean of a number over the workers.

        Collective over the workers: call it on all of them, not inside ``if trainer.rank == 0``.
        """
        number = float(value.detach() if isinstance(value, Tensor) else value)
        with _WAIT:
            return float(self._rank.cluster.workers.allreduce(number)) / self.size

    def _require_loop(self) -> SteppedLoop:
        if self._loop is None:
            raise JobError("training has not begun, or has ended: iterate over trainer.epochs(count)")
        return self._loop

    def _open(self, count: int) -> SteppedLoop | None:
        """Begin training; return None if there is nothing to train. Collective over all ranks."""
        rank, loader = self._rank, self._loader
        with rank.errors_end_the_run():
            if loader is None or self._epoch is not None:
                raise JobError("trainer.epochs needs a loader, and may be called once: call trainer.loader first")
            if not isinstance(count, int) or count < 1:
                raise JobError(f"trainer.epochs got {count!r}: must be a number of epochs, at least 1")
            accumulate, workers = self._config.training.accumulate_steps, self.size
            batch = loader.batch_size * accumulate
            self._examples, self._last = len(loader.split), count - 1
            step_examples = batch * self._config.gradients_per_step(workers)
            split, training_data = loader.split, None
            if self.chief:
                step, cursor = _resumes_at(self._config)  # an earlier start may have had another number of workers
                steps = step + math.ceil(max(0, count * self._examples - cursor) / step_examples)
                training_data = (len(split), split.shape, split.sample_digest(), batch, steps)
            *_, steps = _share(rank, training_data)
            rank.claim_run_dir(self._config)
            request = self._request(split, batch, steps)
            stack = contextlib.ExitStack()
            session = stack.enter_context(training_session(rank.cluster, request, rank.status))
            self._session, rank.session = session, stack
            if session.loop is None:  # the run has finished early
                training = self.model.training
                load(session.run_dir, model=self.model)
                self.model.train(training)
                return None
            assert isinstance(session.loop, SteppedLoop)
            self._loop = session.loop
            self._loop.open()
            return self._loop

    def _close(self) -> None:
        """End training. Collective over all ranks."""
        rank = self._rank
        with rank.errors_end_the_run():
            if self._loop is not None:
                self._loop.close()
            self._loop = None
            stack, rank.session = rank.session, None
            assert stack is not None
            stack.close()
            rank.finish(self._session.stopped)
        if self._session.stopped:
            sys.exit(STOPPED_EARLY)

    def _serve(self) -> None:
        """Serve parameters until the workers have ended, then exit."""
        rank = self._rank
        count, shape, digest, batch, steps = _share(rank, None)
        request = self._request(DescribedSplit(count, shape, digest), batch, steps)
        with training_session(rank.cluster, request, rank.status) as session:
            pass
        rank.finish(session.stopped)
        sys.exit(STOPPED_EARLY if session.stopped else 0)

    def _request(self, split: Split, batch: int, steps: int) -> TrainRequest:
        config = self._config.merged({"batch_size": batch, "train_steps": steps})

        def make() -> Job:
            job = Job(self.model, LossInLoop(), self._optimizer, split, batch_size=batch, train_steps=steps)
            job.source = self._source
            return job

        return TrainRequest(script_path(), {}, config, make, SteppedLoop)


class TrainLoader:
    """This worker's batches of the training examples; see ``Trainer.loader``.

    Attributes:
        split: The examples.
        batch_size: Examples in one batch.
    """

    def __init__(self, trainer: Trainer, split: Split, batch_size: int) -> None:
        if not isinstance(batch_size, int) or batch_size < 1:
            raise JobError(f"trainer.loader got batch_size={batch_size!r}: must be an integer, at least 1")
        self._trainer, self.split, self.batch_size = trainer, split, batch_size

    def __len__(self) -> int:
        """Return the number of batches of an epoch for one worker, rounded up."""
        return math.ceil(len(self.split) / (self.batch_size * self._trainer.size))

    def __iter__(self) -> Iterator[Any]:
        trainer = self._trainer
        loop = trainer._require_loop()
        assert trainer._epoch is not None
        # The last epoch has all steps that are left: with backup workers, some batches do not count.
        end = (trainer._epoch + 1) * len(self.split) if trainer._epoch < trainer._last else math.inf
        device = trainer.device
        while (work := loop.take()) is not None and loop.start_of(work) < end:
            yield _tensors(loop.micro_batch(), device)
            if loop.is_pending:
                raise JobError("a batch was skipped: call backward and step for every batch of the loader")
        trainer._has_more = False


def _tensors(batch: Batch, device: torch.device) -> Any:
    """Return a batch as torch's DataLoader does."""
    if isinstance(batch, CollatedBatch):
        return _moved(batch.examples, device)
    return [torch.from_numpy(array).to(device) for array in (batch.examples, batch.labels)]


def _moved(tree: Any, device: torch.device) -> Any:
    if isinstance(tree, Tensor):
        return tree.to(device)
    if isinstance(tree, dict):
        return {name: _moved(item, device) for name, item in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(_moved(item, device) for item in tree))
    return [_moved(item, device) for item in tree] if isinstance(tree, (tuple, list)) else tree


def _resumes_at(config: RunConfig) -> tuple[int, int]:
    """Return the step, and the number of examples taken, of the checkpoint from which a run resumes; zeros if none."""
    path = given_run_dir(config) if config.run.resume == "auto" else Path(config.run.resume)
    if path is None or config.run.resume == "never":
        return 0, 0
    try:
        with checkpoint.Checkpoint(checkpoint.find(path)[0]) as opened:
            return opened.step, int(opened.attributes["/"]["position"])
    except CheckpointError:  # reported when the run begins, if it matters
        return 0, 0


def _share(rank: Rank, of_chief: Any) -> Any:
    """Return the chief's value. Collective over all ranks; servers wait for it without using a core."""
    with _WAIT:
        barrier = rank.cluster.comm.Ibarrier()
        while not barrier.Test():
            time.sleep(_POLL_S)
        return rank.cluster.comm.bcast(of_chief, root=rank.cluster.chief_rank)


def _use_values_of_chief(model: nn.Module, rank: Rank) -> None:
    """Set a module's parameters and buffers to those of the chief. Collective over all ranks."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    initialized = {name: tensor.detach() for name, tensor in tensors.items() if not is_lazy(tensor)}
    shapes = [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in initialized.items()]
    rank.cluster.check_same({"the parameters and buffers of the model": shapes})
    with _WAIT, torch.no_grad():
        for tensor in initialized.values():
            values = tensor.cpu().contiguous()
            rank.cluster.comm.Bcast(values.reshape(-1).view(torch.uint8).numpy(), root=rank.cluster.chief_rank)
            tensor.copy_(values)


def _refuse_step(*_: Any) -> None:
    raise UserError("call trainer.step() in place of optimizer.step()")


def _refuse_state(*_: Any) -> None:
    raise UserError(
        "optimizer.load_state_dict has no effect on a Trainer, which keeps the optimizer's state and restores it from "
        "the run's checkpoints: remove it, and resume with --run-dir or Trainer(run_dir=...)"
    )


def _warn_of_state(*_: Any) -> None:
    warnings.warn(
        "optimizer.state_dict has no state: the Trainer keeps it, and the run's checkpoints contain it", stacklevel=4
    )
