"""``Trainer``: averaging, parameter servers and checkpoints for a training loop of the user's own."""

from __future__ import annotations

import contextlib
import copy
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .. import optim
from ..data.split import DescribedSplit, Examples, Split
from ..data.steps import Steps
from ..errors import ConfigError, JobError
from ..inference.model import load
from ..monitor.trace import span
from ..plan.job import Job
from ..plan.options import run_config
from ..process.signals import STOPPED_EARLY
from ..pytorch.batches import as_split, as_tensors
from ..pytorch.live_optimizer import LiveOptimizer, check_same_options
from ..pytorch.network import LossInLoop
from ..pytorch.random_numbers import seed_all
from ..pytorch.several_optimizers import as_one
from ..training.hooks import SAVE
from ..training.rank import Rank
from ..training.session import TrainRequest, resumes_at, training_session
from ..training.stepped_loop import SteppedLoop
from .collectives import Collectives, share
from .script_state import HasState, ScriptState
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


class Trainer(Collectives):
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

    In ``sync`` and ``local`` on CPUs, without ``accumulate_steps``, the loop may use and change gradients between
    ``backward`` and ``step``, on all ranks alike: in ``sync`` they are those of all workers; see ``overlap``. The first
    use is collective. ``optimizer.step()`` is the same as ``step()``. Values that the loop, or a scheduler of torch,
    writes to ``optimizer.param_groups`` apply from the next step on; write the same on all ranks.

    Args:
        model: Used unmodified. All ranks begin with the chief's parameters and buffers.
        optimizer: Any of torch except LBFGS and SparseAdam, or one of ``mpitrain.optim``. Ranks share its work and its
            state: those of ``torch.optim`` whose update of an element depends on no other element, by ranges of
            elements; Adafactor, Muon, and classes with ``updates_tensors_separately = True`` by tensors; one rank
            updates with other classes. All but the first kind need ``sync`` or ``local``, on CPUs. So do several
            optimizers of torch, a list, each with its own parameters, whose work is divided by tensors; ``backward``
            and ``step`` then tell which of them are meant, and ``scheduler`` and ``clip_norm`` are None.
        scheduler: A learning-rate scheduler of the optimizer whose ``step`` the Trainer calls; None if there is none,
            or if the loop calls it.
        scheduler_interval: Whether the Trainer calls it after each epoch or after each step.
        clip_norm: Maximum Euclidean norm of the averaged gradient.
        overlap: Whether gradients are averaged and applied during the backward pass, so that the loop cannot use or
            change them, and calls ``backward`` and ``step`` once for each batch. None if the first step decides: they
            are unless it uses a gradient, or calls ``backward`` several times.
        mode: How workers agree on the parameters.
        options: The flags of ``mpitrain train``, such as ``ps=1, run_dir="runs/first", save_secs=600``.

    Attributes:
        model: As given.
        rank, size: Index of this worker, and the number of workers.
        chief: Whether this is the worker that prints and writes files.
        state: Values of the script by name, such as the best accuracy so far: numbers, strings, tensors, and lists,
            tuples and dicts of these. Checkpoints contain the chief's; a run that resumes has them from the first epoch
            or step on.

    Raises:
        UserError: On a single rank without a launcher: an argument is not valid. Otherwise the error is printed, and
            all ranks exit. This applies to all methods.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | optim.Optimizer,
        *,
        scheduler: Any = None,
        scheduler_interval: Literal["epoch", "step"] = "epoch",
        clip_norm: float | None = None,
        overlap: bool | None = None,
        mode: str = "sync",
        **options: Any,
    ) -> None:
        self.model, self._overlap = model, overlap
        self._loader: TrainLoader | None = None
        self._loop: SteppedLoop | None = None  # while it trains
        self._epoch: int | None = None  # that trains
        self._examples = self._last = 0  # examples of an epoch; the last epoch
        self._has_more = False  # whether this epoch has batches that the loop has not used
        self._live: list[LiveOptimizer] = []  # the optimizers of torch
        self._by_epoch = scheduler_interval == "epoch"
        caller = sys._getframe(1)
        self._source = caller.f_code.co_filename, caller.f_lineno  # for errors
        self._rank = rank = Rank.of_script()
        with rank.errors_end_the_run():
            with rank.cluster.agree("reading the options"):
                self._config = run_config({"mode": mode, **options, **rank.options})
                super().__init__(rank, self._config.run.hang_timeout or math.inf)
                for name, instead in _ELSEWHERE.items():
                    if name in options or name in rank.options:
                        raise ConfigError(f"{name} is no option of a Trainer: {instead}")
                if isinstance(optimizer, optim.Optimizer):
                    if scheduler is not None or clip_norm is not None:
                        raise JobError("scheduler and clip_norm are options of the optimizers of mpitrain.optim")
                    self._optimizer = optimizer
                else:
                    if scheduler_interval not in ("epoch", "step"):
                        raise JobError(f"scheduler_interval is {scheduler_interval!r}, must be 'epoch' or 'step'")
                    self._live, self._optimizer = self._follow(optimizer, clip_norm, scheduler)
            rank.cluster.assign(self._config)
            self.rank, self.size = rank.cluster.task_index, len(rank.cluster.worker_ranks)
            self.chief = rank.cluster.chief
            self._script = ScriptState(rank.cluster)
            self._script.add_part("overlap", self._decided_overlap, self._load_overlap)
            for index, live in enumerate(self._live):
                part = "optimizer" if len(self._live) == 1 else f"optimizer {index}"
                self._script.add_part(part, partial(self._optimizer_state, live), live.load_state)
            _use_values_of_chief(model, rank)
            if rank.cluster.is_server:
                self._serve()

    def _follow(
        self, optimizer: Any, clip_norm: float | None, scheduler: Any
    ) -> tuple[list[LiveOptimizer], optim.Optimizer]:
        """Return the optimizers of torch, and the rule that updates with them."""
        if isinstance(optimizer, (list, tuple)) and len(optimizer) == 1:
            (optimizer,) = optimizer
        if not isinstance(optimizer, (list, tuple)):
            live = LiveOptimizer(optimizer, self.model, clip_norm, scheduler, _OptimizerState(self, 0))
            return [live], live.rule
        if not optimizer:
            raise JobError("Trainer got a list without an optimizer: must have at least one")
        if scheduler is not None or clip_norm is not None:
            raise JobError(
                "scheduler and clip_norm of the Trainer need one optimizer: with several, call scheduler.step() and "
                "torch.nn.utils.clip_grad_norm_ in the loop"
            )
        if self._overlap:
            raise JobError("overlap=True needs one optimizer: the gradients of several are averaged after backward")
        several = [
            LiveOptimizer(each, self.model, None, None, _OptimizerState(self, index), index)
            for index, each in enumerate(optimizer)
        ]
        return several, as_one(several, self.model)

    @property
    def step_count(self) -> int:
        """Number of completed steps; over all workers in modes with servers."""
        return 0 if self._loop is None else self._loop.step

    @property
    def state(self) -> dict[str, Any]:
        return self._script.values

    @state.setter
    def state(self, values: dict[str, Any]) -> None:
        self._script.values = dict(values)

    @property
    def device(self) -> torch.device:
        """The device of the model's parameters."""
        return next(self.model.parameters()).device

    def register(self, name: str, owner: HasState, per_rank: bool = False) -> None:
        """Save the state of an object in checkpoints, and restore it when a run resumes. Local; before training begins.

        Schedulers of the optimizer need not be registered.

        Args:
            name: Its name in checkpoints.
            owner: Has ``state_dict``, which returns tensors, numbers, strings, and lists, tuples and dicts of these,
                and ``load_state_dict``: an ``AveragedModel``, a ``GradScaler``, or a class of the script's own. Or it
                is a dict of such values.
            per_rank: Whether each worker has a state of its own, which is dropped if their number changes; otherwise
                all workers get the chief's.
        """
        with self._rank.errors_end_the_run():
            if self._loop is not None or self._epoch is not None:
                raise JobError(f"trainer.register({name!r}, ...) was called after training has begun: call it before")
            self._script.add(name, owner, per_rank)

    def loader(
        self,
        dataset: Examples | Split,
        batch_size: int,
        *,
        shuffle: bool = True,
        num_workers: int = 0,
        prefetch_factor: int = 2,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
    ) -> TrainLoader:
        """Return what takes the place of ``DataLoader`` and ``DistributedSampler`` for the training examples.

        Iterating yields this worker's batches of one epoch, on the model's device; each example of an epoch is in the
        batch of one worker. Call it once.

        Args:
            dataset: A ``torch.utils.data.Dataset``, any object with ``__len__`` and ``__getitem__``, or a split of
                ``mpitrain.data``.
            batch_size: Examples of this worker in one backward pass.
            shuffle: Whether each epoch has its own order of the examples; else it is theirs.
            num_workers: Processes of each rank that load a dataset's examples ahead, kept for all epochs. The batches
                are the same with any number. The flag ``--data-workers`` replaces it.
            prefetch_factor: Batches that each of them loads ahead; ``--prefetch`` replaces it.
            collate_fn: Makes a batch of a list of examples of a dataset; torch's ``default_collate`` by default.
            pin_memory: Whether batches are copied to a GPU from page-locked memory, while the loop goes on.
        """
        with self._rank.errors_end_the_run():
            if self._loader is not None:
                raise JobError("trainer.loader was called twice: a Trainer has one loader of training examples")
            if hasattr(dataset, "__len__") and len(dataset) == 0:
                raise JobError("trainer.loader got a dataset without examples: must have at least one")
            split = as_split(dataset, collate_fn)
            if not isinstance(split, Split):
                raise JobError(f"trainer.loader got {type(dataset).__name__}: must be a dataset, with __len__")
            if not shuffle:
                split = copy.copy(split)
                split.shuffle = False
            self._config = self._config.merged({"data_workers": num_workers, "prefetch": prefetch_factor})
            self._loader = TrainLoader(self, split, batch_size, dataset, pin_memory)
            return self._loader

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the epochs to train, from 0, or from the epoch in which a resumed run has stopped, to ``count - 1``.

        Training begins with the first and ends after the last one: the run then has saved a checkpoint. If a signal or
        a time limit stops the run, it saves, and the script exits with status 75. Collective over the workers.

        To finish earlier, call ``stop``; do not leave the loop with ``break``.
        """
        loop = self._open(count)
        while loop is not None and self._take(loop):
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

    def steps(self, count: int) -> Iterator[int]:
        """Yield the steps to train, from 0, or from that at which a resumed run has stopped, to ``count - 1``.

        In place of a loader and ``epochs``, for loops that make their own data. At each step the random generators of
        torch, NumPy and Python are seeded by the run's seed, the rank and the step, so that a resumed run equals one
        that was not interrupted. Otherwise like ``epochs``.
        """
        with self._rank.errors_end_the_run():
            if self._loader is not None:
                raise JobError(
                    "trainer.steps was called twice, or after trainer.loader, whose place it takes: use one of them"
                )
            if not isinstance(count, int) or count < 1:
                raise JobError(f"trainer.steps got {count!r}: must be a number of steps, at least 1")
            positions = Steps(count, self._config.gradients_per_step(self.size))
            self._loader = TrainLoader(self, positions, 1, positions, False)
        loop = self._open(1)
        self._epoch = 0
        while loop is not None and self._take(loop):
            with self._rank.errors_end_the_run():
                seed_all(self._config.training.seed, loop.micro_batch().position)
            yield loop.step
            with self._rank.errors_end_the_run():
                if loop.is_pending:
                    raise JobError("a step of trainer.steps was skipped: call trainer.backward in each")
        self._close()

    def _take(self, loop: SteppedLoop) -> bool:
        with self._rank.errors_end_the_run():
            return loop.take() is not None

    def backward(self, loss: Tensor, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Compute the gradient of the loss, in place of ``loss.backward()``.

        It begins at zero after ``step``, with or without ``optimizer.zero_grad()``; calls before ``step`` add up.

        Args:
            loss: The mean over the batch.
            optimizer: The one of several whose parameters alone get the gradient; None for all.
        """
        loop, chosen = self._require_loop(), self._chosen(optimizer, "backward")
        for index in chosen:
            self._use_changed_options(loop, self._live[index])
            self._live[index].begin_backward()
        loop.backward(loss, chosen or [0])

    def step(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Update the parameters, as ``optimizer.step()`` does. Collective over the workers if they take the same
        steps.

        Args:
            optimizer: The one of several that updates; None for all that have a gradient.
        """
        self._update(self._chosen(optimizer, "step"))

    def _update(self, chosen: Sequence[int]) -> None:
        """Update with the optimizers of torch that have these indices; with that of this package if there are none."""
        loop, changed = self._require_loop(), False
        for index in chosen:
            changed |= self._use_changed_options(loop, self._live[index])
            self._live[index].note_step()
        loop.update(chosen or [0], divide=changed)
        self._advance_scheduler(loop)

    def _chosen(self, optimizer: torch.optim.Optimizer | None, method: str) -> Sequence[int]:
        """Return the indices of the optimizers of torch that are meant."""
        if optimizer is None:
            return range(len(self._live))
        chosen = [index for index, live in enumerate(self._live) if live.is_of(optimizer)]
        if not chosen:
            raise JobError(f"trainer.{method} got an optimizer that the Trainer does not have: pass it to the Trainer")
        return chosen

    def _use_changed_options(self, loop: SteppedLoop, live: LiveOptimizer) -> bool:
        """Update with the options that the optimizer has now; return whether they have changed since ``backward``."""
        have_changed, is_other_rule = live.changes(loop.can_change_options)
        if is_other_rule:
            loop.set_optimizer(live.rule)
        return have_changed

    def _advance_scheduler(self, loop: SteppedLoop) -> None:
        """Call the scheduler as often as its interval has passed."""
        examples = loop.data_cursor if loop.synchronous else loop.step * loop.plan.step_examples
        for live in self._live:
            live.advance_scheduler(examples // self._examples if self._by_epoch else loop.step)

    def _check_state(self, live: LiveOptimizer) -> bool:
        """Return whether the optimizer was given a state, the same on all workers. Collective over the workers."""
        try:
            return live.check_state(self.gather)
        except JobError as error:
            error.on_all_ranks = error.on_all_ranks and not self._rank.cluster.servers
            raise

    def _use_state(self, live: LiveOptimizer, loop: SteppedLoop) -> None:
        """Train with the state that an optimizer has, the same on all workers. Collective over the workers."""
        try:
            live.use_state(loop)
        except JobError as error:
            error.on_all_ranks = not self._rank.cluster.servers
            raise

    def _optimizer_state(self, live: LiveOptimizer) -> dict[str, Any]:
        """Return what checkpoints contain of an optimizer besides its slots. Collective over the workers.

        Raises:
            JobError: The workers take the same steps with different options.
        """
        if not self._config.uses_servers:
            check_same_options(self.gather(live.options_of_script))
        return live.state()

    def _decided_overlap(self) -> bool | None:
        """Return what the first step has decided, so that a run that resumes does not decide again."""
        return self._overlap if self._loop is None else self._loop.overlaps

    def _load_overlap(self, overlap: bool | None) -> None:
        if self._overlap is None:
            self._overlap = overlap

    def change_parameters(self, change: Callable[[], object]) -> None:
        """Change parameters in another way than by an optimizer: by a function that changes them in place.

        The ranks of a node share the parameters, so the function is called on one rank of each node; it must compute
        the same everywhere. It may use gradients, which begin at zero after it, as after ``step``. In ``sync`` and
        ``local`` on CPUs. Collective over the workers.
        """
        with self._rank.errors_end_the_run():
            self._require_loop().change_params(change)

    def save(self) -> None:
        """Request a checkpoint; it is written as soon as all workers hold the same parameters. Local.

        It is enough if the chief calls it.
        """
        self._require_loop().request_pause(SAVE)

    def stop(self, reason: str = "requested by the script") -> None:
        """Finish training early: all workers stop after a step that they have begun. Local; one rank is enough."""
        self._require_loop().stop(reason)

    def print(self, *values: Any, **how: Any) -> None:
        """Print on the chief, as the built-in function does; nothing on other workers. Local."""
        if self.chief:
            print(*values, **{"flush": True, **how})

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
            fixed = loader.split.steps if isinstance(loader.split, Steps) else None
            step_examples = batch * self._config.gradients_per_step(workers)
            split, training_data = loader.split, None
            if self.chief:
                step, cursor = resumes_at(self._config)  # an earlier start may have had another number of workers
                steps = fixed or step + math.ceil(max(0, count * self._examples - cursor) / step_examples)
                training_data = (len(split), split.shape, split.sample_digest(), batch, steps)
            *_, steps = share(rank, training_data)
            rank.claim_run_dir(self._config)
            with_state = [live for live in self._live if self._check_state(live)]
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
            several = [live.parameter_names for live in self._live] if len(self._live) > 1 else [None]
            self._loop.open(self._overlap, several)
            self._began_at = self._loop.step
            for live in self._live:
                if live in with_state and not self._began_at:
                    self._use_state(live, self._loop)
                else:  # a run that resumes has its own state
                    live.drop_state()
            self._script.extra_state()  # finds values that cannot be saved
            self._advance_scheduler(self._loop)  # if it has no state in the checkpoint
            return self._loop

    def _close(self) -> None:
        """End training. Collective over all ranks."""
        rank = self._rank
        with rank.errors_end_the_run():
            if self._loop is not None:
                if not self._loop.n_updates and not self._began_at and not self._session.stopped:
                    raise JobError("trainer.step() was never called: call it after trainer.backward(loss)")
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
        count, shape, digest, batch, steps = share(rank, None)
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

        return TrainRequest(script_path(), {}, config, make, SteppedLoop, self._script)


class _OptimizerState:
    """Holds the state of an optimizer of a Trainer; implements ``pytorch.live_optimizer.Owner``.

    While the Trainer trains, all but ``drop_state`` are collective over the workers; before, they do nothing.
    """

    def __init__(self, trainer: Trainer, index: int) -> None:
        self._trainer, self._index = trainer, index

    def step(self) -> None:
        self._trainer._update([self._index])

    def collect_state(self) -> None:
        if (loop := self._training("state_dict")) is not None:
            gather = None if loop.plan.config.mode.averages_params else self._trainer.gather
            self._live.set_state(loop, gather)

    def drop_state(self) -> None:
        if self._training("") is not None:
            self._live.drop_state()

    def use_state(self) -> None:
        if (loop := self._training("load_state_dict")) is not None:
            if not loop.plan.config.mode.averages_params:  # else each worker has its own
                self._trainer._check_state(self._live)
            self._live.use_state(loop)

    @property
    def _live(self) -> LiveOptimizer:
        return self._trainer._live[self._index]

    def _training(self, method: str) -> SteppedLoop | None:
        """Return the loop while it trains, when all workers have called a method of the optimizer; None before."""
        loop = self._trainer._loop
        if loop is None and self._trainer._epoch is not None:
            raise JobError(f"optimizer.{method} was called after training: call it in the loop, after step")
        if loop is None:
            return None
        if method:
            loop.check_slots(method)
            self._trainer._wait_for_workers(f"optimizer.{method}")
        return loop


class TrainLoader:
    """This worker's batches of the training examples; see ``Trainer.loader``.

    Attributes:
        dataset: As given to ``Trainer.loader``.
        split: The examples.
        batch_size: Examples in one batch.
    """

    def __init__(self, trainer: Trainer, split: Split, batch_size: int, dataset: Any, pin_memory: bool) -> None:
        if not isinstance(batch_size, int) or batch_size < 1:
            raise JobError(f"trainer.loader got batch_size={batch_size!r}: must be an integer, at least 1")
        self._trainer, self.split, self.batch_size = trainer, split, batch_size
        self.dataset, self._pin_memory = dataset, pin_memory

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
        while not self._has_ended(loop) and (work := loop.take()) is not None and loop.start_of(work) < end:
            yield as_tensors(loop.micro_batch(), device, self._pin_memory)
            if loop.is_pending:
                raise JobError("a batch was skipped: call trainer.backward for every batch of the loader")
        trainer._has_more = False

    def _has_ended(self, loop: SteppedLoop) -> bool:
        """Whether the epoch has no further step; then what follows in the loop comes before the next checkpoint."""
        assert self._trainer._epoch is not None
        loop.finish_pending()
        return loop.synchronous and loop.data_cursor >= (self._trainer._epoch + 1) * len(self.split)


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
