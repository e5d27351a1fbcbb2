"""Metrics of validation examples, and numbers, that a script records."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..comm.cluster import Group
from ..errors import JobError
from ..monitor.metrics import RECORDED
from ..monitor.trace import span
from ..plan.metric import PREFIX, Metric, check_metrics, is_name, number_of
from ..pytorch.modes import inference
from ..pytorch.outputs import facts_of, joined, outputs_of, share_of
from ..training.evaluation import Parts, metrics_of
from .script_run import ScriptRun


def evaluate(trainer: ScriptRun, loader: Any, metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Measure and record metrics; see ``Trainer.evaluate``.

    Raises:
        JobError: The loader or a metric is not valid, or a metric fails.
    """
    group = _group(trainer)
    comm = group.comm
    with group.agree("reading the arguments of trainer.evaluate"):
        check_metrics("trainer.evaluate", metrics)
        share = share_of(loader, comm.rank, comm.size)
    all_facts = comm.allgather(facts_of(loader))
    with group.agree("comparing the arguments of trainer.evaluate"):
        if len(set(all_facts)) > 1:
            raise JobError(
                "trainer.evaluate got different examples on each worker: pass a DataLoader of all validation "
                "examples on all workers; evaluate divides its batches"
            )
    parts: Parts = {}
    dtype = np.dtype(trainer._config.training.dtype)
    with span("validate"), _inference(trainer):
        for number, batch in share:
            parts[number] = outputs_of(trainer.model, batch, dtype, trainer.device)
    values = metrics_of(group, joined, metrics, parts)
    if trainer._loop is not None:
        trainer._loop.add_validation(trainer._loop.step, {PREFIX + name: value for name, value in values.items()})
    return values


def log(trainer: ScriptRun, values: Mapping[str, Any]) -> None:
    """Record numbers of the script; see ``Trainer.log``.

    Raises:
        JobError: A name or a value is not valid, or the script does not train.
    """
    loop = trainer._require_loop()
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


def _group(trainer: ScriptRun) -> Group:
    """Return the ranks that measure together: all workers, or this worker alone if workers run at their own pace.

    Collective over the workers, if it returns all workers.
    """
    workers = trainer._rank.cluster.training
    if trainer._loop is not None and not trainer._loop.synchronous:
        return workers.alone()
    trainer._wait_for_workers("trainer.evaluate")
    return workers


def _inference(trainer: ScriptRun) -> contextlib.AbstractContextManager[None]:
    """Return a context for inference with the model; during training see ``SteppedLoop.inference``."""
    return inference(trainer.model) if trainer._loop is None else trainer._loop.inference()
