"""``Trainer``: averaging, parameter servers and checkpoints for the user's own training loop."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .. import optim
from ..comm.cluster import Group
from ..data.orders import Order, Sequential
from ..data.random_numbers import seed_all
from ..data.split import Examples, Split
from ..data.steps import Steps
from ..errors import ConfigError, JobError
from ..monitor.metrics import RECORDED
from ..monitor.trace import span
from ..plan.config import FIELDS
from ..plan.metric import PREFIX, Metric, check_metrics, is_name, number_of
from ..plan.option import info_of
from ..plan.options import run_config
from ..pytorch.batches import as_split
from ..pytorch.modes import inference
from ..pytorch.outputs import facts_of, joined, outputs_of, share_of
from ..training.evaluation import Parts, metrics_of
from ..training.hooks import SAVE
from ..training.script_rank import ScriptRank
from .script_optimizers import ScriptOptimizers
from .script_state import HasState, ScriptState
from .script_training import ScriptTraining, check_positive
from .train_loader import TrainLoader, check_count

_WAIT = span("wait")
_log = logging.getLogger(__name__)


class Trainer(ScriptTraining):
    """Trains a PyTorch module in the user's own loop, on all ranks that run the script.

    ::

        trainer = mpitrain.Trainer(model, optimizer, mode="sync")
        loader = trainer.loader(dataset, batch_size=32)
        for epoch in trainer.epochs(10):
            for inputs, labels in loader:
                loss = loss_of(model(inputs), labels)
                trainer.backward(loss)
                trainer.step()

    Construction is collective over all ranks. On ranks of parameter servers the constructor does not return. It serves
    parameters until the workers have ended, and then exits the process, like TensorFlow's ``server.join()``.

    Flags before the script in ``mpitrain run FLAGS script.py`` replace ``mode`` and ``options``.

    After ``backward``, ``param.grad`` is the average over all workers in ``sync``, and this worker's own gradient in
    other modes. The loop may use and change it before ``step``, in ``sync`` in the same way on all ranks.
    ``optimizer.step()`` is the same as ``step()``. Values that the loop, or a scheduler of torch, writes to
    ``optimizer.param_groups`` apply from the next step on; write the same on all ranks.

    Args:
        model: Used unmodified. All ranks begin with the chief's parameters and buffers.
        optimizer: Any optimizer of torch except LBFGS and SparseAdam, or one of ``mpitrain.optim``. Ranks divide the
            work and the state of an optimizer of torch. If an element's update depends on no other element, they divide
            by ranges of elements. For Adafactor, Muon, and classes with ``updates_tensors_separately = True``, they
            divide by tensors. For other classes, one rank updates. Only the first kind works in all modes; the others
            need ``sync``, or ``local`` on CPUs. A list of several optimizers of torch, each with its own parameters,
            also needs one of these. The work of a list is divided by tensors, the arguments of ``backward`` and
            ``step`` select optimizers, and ``scheduler`` and ``clip_norm`` are None.
        scheduler: A learning-rate scheduler of the optimizer whose ``step`` the Trainer calls; None if there is none,
            or if the loop calls it.
        scheduler_interval: Whether the Trainer calls the scheduler after each epoch or after each step.
        clip_norm: Maximum Euclidean norm of the averaged gradient.
        mode: How workers agree on the parameters.
        options: The flags of ``mpitrain train``, such as ``ps=1, run_dir="runs/first", save_secs=600``.

    Attributes:
        model: As given.
        rank, size: Index of this worker, and the number of workers.
        chief: Whether this is the worker that prints and writes files.
        state: Values of the script by name, such as the best accuracy so far: numbers, strings, tensors, and lists,
            tuples and dicts of these. Checkpoints contain the chief's values; a resumed run has them from its first
            epoch or step on.

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
        mode: str = "sync",
        **options: Any,
    ) -> None:
        self.model = model
        caller = traceback.extract_stack(limit=2)[0]
        self._source = caller.filename, caller.lineno or 0  # for errors
        self._rank = rank = ScriptRank.of_process()
        with rank.errors_end_the_run():
            with rank.cluster.agree("reading the options"):
                self._config = run_config({"mode": mode, **options, **rank.options})
                super().__init__(rank, self._config.run.hang_timeout or math.inf)
                self._micro_batches = []
                for name in {**options, **rank.options}:
                    if instead := info_of(FIELDS[name]).in_scripts:
                        raise ConfigError(f"{name} is no option of a Trainer: {instead}")
                if self._config.training.goal is not None and not self._config.mode.averages_gradients:
                    raise ConfigError(
                        f"--stop-metric needs --mode sync with a Trainer, but the mode is {self._config.mode.name}; "
                        "call trainer.stop() in the loop"
                    )
                self._optimizers = ScriptOptimizers(self, optimizer, clip_norm, scheduler, scheduler_interval)
            rank.cluster.assign(self._config)
            self.rank, self.size = rank.cluster.task_index, len(rank.cluster.worker_ranks)
            self.chief = rank.cluster.chief
            self._script = ScriptState(rank.cluster)
            self._script.add_part("order", self._order, self._check_order)
            self._optimizers.add_parts(self._script)
            _use_values_of_chief(model, rank)
            if rank.cluster.is_server:
                self._serve()
            if self.chief and self.size > 1 and not torch.distributed.is_initialized() and _asks_for_ranks(caller):
                _log.warning(
                    "helpers of the script, such as is_main_process, ask torch.distributed, which has no group: each "
                    "rank will take itself for the only one; see the page From DDP to mpitrain"
                )

    @property
    def step_count(self) -> int:
        """Number of completed steps; in modes with servers, of all workers together."""
        return self._steps_done if self._loop is None else self._loop.step

    @property
    def is_stopping(self) -> bool:
        """Whether training ends before its last step, because of a signal, a time limit, ``stop`` or early stopping.

        No step follows when it is True, so an epoch may be incomplete. In ``sync`` and ``local`` it has the same value
        on all workers when it is read after the same step or epoch; with servers, after an epoch.
        """
        return self._loop is not None and self._loop.is_stopping

    @property
    def state(self) -> dict[str, Any]:
        return self._script.values

    @state.setter
    def state(self, values: dict[str, Any]) -> None:
        self._script.values = dict(values)

    def register(
        self, name: str, owner: HasState | dict[str, Any], per_rank: bool = False, keys: Sequence[str] | None = None
    ) -> None:
        """Save the state of an object in checkpoints, and restore it when a run resumes. Local; before training begins.

        Schedulers of the optimizer need not be registered.

        Args:
            name: The object's name in checkpoints.
            owner: An object with ``state_dict`` and ``load_state_dict``, such as an ``AveragedModel``, a
                ``GradScaler``, or an object of the script's own class; or a dict. Values are tensors, numbers, strings,
                and lists, tuples and dicts of these.
            per_rank: Whether each worker has its own state, which is dropped if the number of workers changes;
                otherwise all workers get the chief's state.
            keys: The keys of the values of a dict that are saved; None for all. ``register("script", globals(),
                keys=["best"])`` saves a variable of the script.
        """
        with self._rank.errors_end_the_run():
            if self._loop is not None or self._epoch is not None:
                raise JobError(
                    f"trainer.register({name!r}, ...) was called after training has begun: call it before the loop"
                )
            self._script.add(name, owner, per_rank, keys)

    def loader(
        self,
        dataset: Examples | Split,
        batch_size: int,
        *,
        shuffle: bool = True,
        order: Order | Callable[[int, int], int] | None = None,
        num_workers: int = 0,
        prefetch_factor: int | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
    ) -> TrainLoader:
        """Return the loader of training examples, in place of ``DataLoader`` and ``DistributedSampler``.

        Iterating yields this worker's batches of one epoch, on the model's device. Each example of an epoch is in the
        batch of one worker. If the examples do not fill an epoch's last step, the step continues with the first
        examples of the next epoch. Call ``loader`` once.

        Args:
            dataset: A ``torch.utils.data.Dataset``, any object with ``__len__`` and ``__getitem__``, or a split of
                ``mpitrain.data``.
            batch_size: Examples of this worker in one backward pass.
            shuffle: Whether the examples are in a different order in each epoch; else they are in the dataset's order.
            order: The order of the examples, in place of the shuffled order; see ``Split.ordered``.
            num_workers: Processes of each rank that load a dataset's examples ahead, kept for all epochs. The batches
                are the same with any number. The flag ``--data-workers`` replaces this argument.
            prefetch_factor: Batches that each of these processes loads ahead; ``--prefetch`` replaces this argument,
                and has the default.
            collate_fn: Makes a batch from a list of examples of a dataset; torch's ``default_collate`` by default.
            pin_memory: Whether batches are copied to a GPU asynchronously, from page-locked memory.
        """
        with self._rank.errors_end_the_run():
            if self._loader is not None:
                raise JobError("trainer.loader was called twice: a Trainer has one loader of training examples")
            if hasattr(dataset, "__len__") and len(dataset) == 0:
                raise JobError("trainer.loader got a dataset without examples: must have at least one")
            check_count("num_workers", num_workers, 0)
            if prefetch_factor is not None:
                check_count("prefetch_factor", prefetch_factor, 1)
            split = as_split(dataset, collate_fn)
            if not isinstance(split, Split):
                raise JobError(f"trainer.loader got {type(dataset).__name__}: must be a dataset, with __len__")
            if not shuffle and order is not None:
                raise JobError("trainer.loader got shuffle=False and an order: pass only one of the two")
            if order is not None or not shuffle:
                split = split.ordered(order or Sequential())
            self._config = self._config.merged({"data_workers": num_workers, "prefetch": prefetch_factor})
            self._loader = TrainLoader(self, split, batch_size, dataset, pin_memory)
            return self._loader

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the epochs to train, from 0, or from the epoch in which a resumed run has stopped, to ``count - 1``.

        Training begins with the first epoch and ends after the last, when the run has saved a checkpoint. If a signal
        or a time limit stops the run, it saves, and the script exits with status 75. Collective over the workers.

        To finish earlier, call ``stop``; do not leave the loop with ``break``.
        """
        loop = self._open("epochs", epochs=count)
        while loop is not None and self._take(loop):
            at = loop.data_cursor // self._examples
            if self._epoch is None:
                self._epoch = at
            elif self._config.run.join is None:
                self._epoch += 1
            else:  # it leaves out the epochs that other learners have trained
                self._epoch = max(self._epoch + 1, min(at, self._last))
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
        """Yield the steps to train, from 0, or from the step at which a resumed run has stopped, to ``count - 1``.

        This replaces a loader and ``epochs`` in loops that make their own data. At each step the random generators of
        torch, NumPy and Python are seeded by the run's seed, the rank and the step. A resumed run therefore gives the
        same results as an uninterrupted run. Otherwise like ``epochs``.
        """
        with self._rank.errors_end_the_run():
            if self._loader is not None:
                raise JobError(
                    "trainer.steps was called twice, or after trainer.loader: call only one of the two, and once"
                )
            check_positive("steps", count)
            positions = Steps(count, self._config.gradients_per_step(self.size))
            self._loader = TrainLoader(self, positions, 1, positions)
        loop, self._epoch = self._open("steps", steps=count), 0
        while loop is not None and self._take(loop):
            with self._rank.errors_end_the_run():
                batch = loop.micro_batch()
                seed_all(self._config.training.seed, batch.position)
                self._begin_micro_batch(batch.position)
            yield loop.step
            with self._rank.errors_end_the_run():
                if loop.is_pending:
                    raise JobError("a step of trainer.steps was skipped: call trainer.backward in every step")
        self._close()

    def batches(self, count: int) -> Iterator[tuple[int, Any]]:
        """Yield steps and batches of the loader, from step 0, or from the step at which a resumed run has stopped, to
        ``count - 1``.

        This replaces ``epochs`` and a loop over the loader in training that is counted in steps; with servers, in
        steps of all workers. Otherwise like ``epochs``.
        """
        loop, self._epoch = self._open("batches", steps=count), 0
        while loop is not None and self._take(loop):
            assert self._loader is not None
            yield loop.step, self._loader.next_batch(loop)
            with self._rank.errors_end_the_run():
                self._loader.check_used(loop)
        self._close()

    def backward(self, loss: Tensor, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Compute the gradient of the loss, in place of ``loss.backward()``; in ``sync``, average it over the workers.

        Between nodes and between GPUs, ranges of the gradient are averaged while the backward pass computes others, as
        in ``DistributedDataParallel``. The gradient begins at zero after ``step``, with or without
        ``optimizer.zero_grad()``; the gradients of several calls before ``step`` are added. In ``sync`` and ``local``,
        collective over the workers, except inside ``no_sync``.

        Args:
            loss: The mean over the batch.
            optimizer: With several optimizers, the optimizer whose parameters get a gradient; None for all.
        """
        self._require_loop().backward(loss, self._optimizers.chosen(optimizer, "backward"))

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Do not average gradients in ``backward`` inside this context, as in ``DistributedDataParallel``.

        The first ``backward`` outside of it averages the sum of all gradients since the last ``step``; if there is
        none, ``step`` does. Local; all workers call it for the same batches.
        """
        loop = self._require_loop()
        before, loop.averages = loop.averages, False
        try:
            yield
        finally:
            loop.averages = before

    def step(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Update the parameters, as ``optimizer.step()`` does. Collective over the workers if they take the same
        steps.

        Args:
            optimizer: With several optimizers, the optimizer that updates; None for all that have a gradient.
        """
        self._optimizers.update(self._require_loop(), self._optimizers.chosen(optimizer, "step"))

    def change_parameters(self, change: Callable[[], object]) -> None:
        """Change parameters with a function that changes them in place, instead of with an optimizer.

        The ranks of a node share the parameters, so the function is called on one rank of each node. It must compute
        the same values on all of these ranks. It may use gradients; afterwards they begin at zero, as after ``step``.
        Only in ``sync`` and ``local`` on CPUs. Collective over the workers.
        """
        with self._rank.errors_end_the_run():
            self._require_loop().change_params(change)

    def evaluate(self, loader: Any, metrics: Mapping[str, Metric]) -> dict[str, float]:
        """Measure metrics on validation examples, with the model in evaluation mode. Collective over the workers in
        ``sync`` and ``local``, and after training.

        The workers divide the batches of the loader. A metric gets the outputs and labels of all examples, which the
        chief has in memory. The value of a metric therefore does not depend on the number of workers. Call ``evaluate``
        after ``step`` or after an epoch, unless ``is_stopping``. Values that are measured while the run trains are
        recorded and printed.

        In ``local`` the chief's parameters are measured, and of a learner the common ones. In modes with servers,
        workers are at different places in the loop. Each worker then measures all examples with its own parameters, and
        the chief's values are recorded.

        Args:
            loader: A ``torch.utils.data.DataLoader`` of all examples, the same on all workers, without shuffling. A
                batch is a tuple, inputs followed by the labels, or a dict with ``labels``.
            metrics: Functions of outputs and labels, tensors on the CPU, by name, such as
                ``{"loss": nn.CrossEntropyLoss()}``, which return a number or a dict of numbers; or objects of
                torchmetrics.

        Returns:
            The values by name; in ``sync`` and ``local`` the same on all workers.
        """
        with self._rank.errors_end_the_run():
            group = self._measuring()
            with group.agree("reading the arguments of trainer.evaluate"):
                check_metrics("trainer.evaluate", metrics)
                share = share_of(loader, group.comm.rank, group.comm.size)
            all_facts = group.comm.allgather(facts_of(loader))
            with group.agree("comparing the arguments of trainer.evaluate"):
                if len(set(all_facts)) > 1:
                    raise JobError(
                        "trainer.evaluate got different examples on each worker: pass a DataLoader of all validation "
                        "examples on all workers; evaluate divides its batches"
                    )
            parts: Parts = {}
            dtype, loop = np.dtype(self._config.training.dtype), self._loop
            measuring = inference(self.model) if loop is None else loop.inference()
            with span("validate"), measuring, group.agree("computing the outputs for trainer.evaluate"):
                for number, batch in share:
                    parts[number] = outputs_of(self.model, batch, dtype, self.device)
            values = metrics_of(group, joined, metrics, parts)
            if loop is not None:
                loop.add_validation(loop.step, {PREFIX + name: value for name, value in values.items()})
            return values

    def _measuring(self) -> Group:
        """Return the ranks that measure together: all workers, or this worker alone if workers run at their own pace.

        Collective over the workers, if it returns all workers.
        """
        workers = self._rank.cluster.training
        if self._loop is not None and not self._loop.synchronous:
            return workers.alone()
        self._wait_for_workers("trainer.evaluate")
        return workers

    def log(self, values: Mapping[str, Any]) -> None:
        """Record numbers at the present step, in ``metrics.jsonl`` and with the run's other numbers. Local.

        Only the chief's numbers are recorded; other workers may call it, too.

        Args:
            values: Numbers, or tensors without dimensions, by name.
        """
        with self._rank.errors_end_the_run():
            loop = self._require_loop()
            if not loop.cluster.chief:
                return
            if not isinstance(values, Mapping):
                raise JobError(f'trainer.log got {type(values).__name__}: must be a dict, such as {{"reward": 0.5}}')
            for name in values:
                if not is_name(name) or name in RECORDED:
                    raise JobError(
                        f"trainer.log got the name {name!r}: must be letters, digits and any of _ . -, after a "
                        f"letter, but not one that the run itself records: {', '.join(sorted(RECORDED))}"
                    )
            loop.log({name: number_of(f"trainer.log got {name!r}:", value) for name, value in values.items()})

    def save(self) -> None:
        """Request a checkpoint; it is written as soon as all workers hold the same parameters. Local.

        It is enough if the chief calls it.
        """
        self._require_loop().request_pause(SAVE)

    def stop(self, reason: str = "requested by the script") -> None:
        """Finish training early: all workers stop after the step that they have begun, or after the next one. Local.

        A call on one rank is enough.
        """
        self._require_loop().stop(reason)

    def print(self, *values: Any, **how: Any) -> None:
        """Print on the chief, as the built-in function does; nothing on other workers. Local."""
        if self.chief:
            print(*values, **{"flush": True, **how})


def _asks_for_ranks(script: traceback.FrameSummary) -> bool:
    """Return whether modules in the folder of a script have a helper of the kind that torchvision's scripts have."""
    folder = os.path.dirname(os.path.abspath(script.filename)) + os.sep
    modules = [vars(module) for module in [*sys.modules.values()] if module is not None]
    own = [each for each in modules if str(each.get("__file__")).startswith(folder)]
    return any("is_dist_avail_and_initialized" in each for each in own)


def _use_values_of_chief(model: nn.Module, rank: ScriptRank) -> None:
    """Set a module's parameters and buffers to the chief's values. Collective over all ranks."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    initialized = {name: tensor.detach() for name, tensor in tensors.items() if not is_lazy(tensor)}
    shapes = [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in initialized.items()]
    rank.cluster.check_same({"the parameters and buffers of the model": shapes})
    with _WAIT, torch.no_grad():
        for tensor in initialized.values():
            values = tensor.cpu().contiguous()
            rank.cluster.comm.Bcast(values.reshape(-1).view(torch.uint8).numpy(), root=rank.cluster.chief_rank)
            tensor.copy_(values)
