"""Survey of a job's data, without MPI: its contents, and the speeds of loading and computing."""

from __future__ import annotations

import math
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from ..core import subnormals
from ..core.cpus import share_of, usable_cores
from ..core.device import CPU
from ..core.training_state import TrainingState
from ..data import BatchSource, InMemory, Loader, Split, Streaming
from ..data.batch import Batch, CollatedBatch, Loading
from ..data.checks import check_labels
from ..data.split import DatasetSplit
from ..data.trees import leaves, map_children
from ..models.base import Model
from ..models.select import make_model
from ..plan.config import RunConfig
from ..plan.job import Job
from ..plan.network import Network
from ..plan.plan import Plan, make_plan

_SHOWN_EXAMPLES = 3
_COMPARED = 16  # number of examples, or of parts with ``--quick``, that are compared with the first one
_LABELS_SECONDS = 2.0  # time after which the count of labels stops
_FEW_LABELS = 20
_NEGLIGIBLE = 0.05  # fraction of the computing time; if loading takes less, a data worker is not worthwhile


@dataclass(frozen=True)
class SplitFacts:
    """Contents of a split.

    Attributes:
        name: ``training`` or ``validation``.
        source: Origin of the data.
        count: Number of examples.
        order: Order of the training examples.
        bytes: Size of all examples in memory, in bytes; None if they are loaded one by one.
        examples: The first examples as they reach the model.
        labels: How often each label occurs among the first ``labelled`` examples; None unless the labels are classes or
            few different integers.
        labelled: Number of examples whose labels were counted.
        class_names: The names of the classes by label; empty if the classes have no names.
        columns: The types of the columns of a table, by name.
        note: What is left out, or how the files are read; None if there is nothing to say.
    """

    name: str
    source: str
    count: int
    order: str
    bytes: int | None
    examples: list[Any]
    labels: dict[int, int] | None
    labelled: int
    class_names: Sequence[str]
    columns: Mapping[str, str]
    note: str | None


@dataclass(frozen=True)
class Speed:
    """How fast one rank loads and computes, in examples per second.

    Attributes:
        cores: This rank's share of the cores.
        threads: Threads that compute.
        batch: Examples in a batch.
        batch_bytes: Size of a batch in bytes.
        loading: The rate of one process that only loads.
        computing: The rate of forward and backward passes, without loading.
        data_workers: Number of processes that load as fast as the rank computes, but at most max(1, cores - 1); 0 if
            processes would not help.
    """

    cores: int
    threads: int
    batch: int
    batch_bytes: int
    loading: float
    computing: float
    data_workers: int


def facts_of(name: str, split: Split, network: Network, dtype: Any, quick: bool = False) -> SplitFacts:
    """Return the contents of a split. Reads its first examples, and labels for about two seconds.

    The examples of all shards or row groups, or if ``quick`` of some, are compared with the first one.

    Raises:
        DataError: An example cannot be loaded, or differs from the first one.
    """
    first = split.read_batch(0, min(_SHOWN_EXAMPLES, len(split)))
    if isinstance(first, CollatedBatch):
        tree = network.shown(first, dtype)
    else:
        tree = split.scaled(first.examples, None if network.takes_integers(split) else dtype), first.labels
    _compare_parts(split, quick)
    counts, labelled = _count_labels(split)
    return SplitFacts(
        name,
        split.source,
        len(split),
        split.order_name,
        None if isinstance(split, DatasetSplit) else split.nbytes,
        [_example(tree, index) for index in range(first.count)],
        counts,
        labelled,
        split.class_names if isinstance(split, DatasetSplit) else (),
        split.columns,
        split.note,
    )


def _compare_parts(split: Split, quick: bool) -> None:
    """Read the first example of each part of a split beside the first of all; of an array in a file, all examples."""
    if split.is_stream or len(split) == 0:
        return
    if isinstance(split, DatasetSplit):
        starts = [start for start in getattr(split.dataset, "starts", ()) if start < len(split)]
        some = starts or range(len(split))
        for start in some[:: max(1, len(some) // _COMPARED)] if quick or not starts else starts:
            split.load(np.array([0, start]), 0, 0)
        return
    block = split.block or len(split)
    for start in range(0, len(split), block * (max(1, len(split) // block // _COMPARED) if quick else 1)):
        batch = split.read_batch(start, min(start + block, len(split)))
        check_labels(split, batch.labels, start)


def measure(job: Job, config: RunConfig, ranks: int, seconds: float) -> Speed:
    """Load and compute batches of a job in this process, for ``seconds`` each.

    Args:
        ranks: Ranks of this machine, which share its cores.

    Raises:
        DataError, JobError, ConfigError: The job cannot be trained.
    """
    own = usable_cores()
    cores = share_of(len(own), ranks, own)
    threads = config.device.threads or cores
    threadpool_limits(threads)
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(threads)
    config = job.completed(config)
    plan = make_plan(job, config, 1)
    model = make_model(job, plan, [CPU], TrainingState(plan.layout, job.network.frozen))
    params, grads = np.zeros((2, plan.layout.size), plan.dtype)
    job.network.initialize(plan.layout, params, config.training.seed)
    model.bind(params, grads)
    loader = _loader(job, plan, model)
    try:
        batches, loading = _loading_rate(loader, plan.batch, seconds)
    finally:
        loader.close()
    with subnormals.flushed(config.device.flush_denormals):
        computing = _computing_rate(model, batches, seconds)
    needed = math.ceil(computing / loading)
    if isinstance(loader, Loader) or computing / loading < _NEGLIGIBLE:
        needed = 0
    workers = min(needed, max(1, cores - 1))
    return Speed(cores, threads, plan.batch, _size(batches[0]), loading, computing, workers)


def _loader(job: Job, plan: Plan, model: Model) -> BatchSource:
    split, seed = job.train_split, plan.config.training.seed
    dtype = None if job.network.takes_integers(split) or model.accepts_raw else plan.dtype
    if (own := split.own_loader(seed, Loading(dtype=dtype))) is not None:
        return own
    if split.block is not None:
        return Loader(split, Streaming(split), seed, dtype, stride=plan.batch, reuse=False)
    whole = split.read_batch(0, len(split))
    return Loader(split, InMemory(whole.examples, whole.labels), seed, dtype, reuse=False)


def _loading_rate(loader: BatchSource, count: int, seconds: float) -> tuple[list[Batch], float]:
    """Return the last batches, and the examples loaded per second without the first batch."""
    batches = [loader.batch(0, count)]
    began, loaded = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - began) < seconds or not loaded:
        batches = [*batches[-7:], loader.batch(loaded + count, count)]
        loaded += count
    return batches, loaded / elapsed


def _computing_rate(model: Model, batches: list[Batch], seconds: float) -> float:
    def step(batch: Batch) -> None:
        model.load_params()
        float(model.compute_loss(batch))
        model.compute_grads(lambda start: None)

    step(batches[0])  # kernels are compiled
    began, computed, steps = time.perf_counter(), 0, 0
    while (elapsed := time.perf_counter() - began) < seconds or not computed:
        step(batches[steps % len(batches)])
        computed, steps = computed + batches[steps % len(batches)].count, steps + 1
    return computed / elapsed


def _count_labels(split: Split) -> tuple[dict[int, int] | None, int]:
    """Count the labels of the first examples, if they are classes or few different integers."""
    counts: Counter[int] = Counter()
    end, labelled, part = time.perf_counter() + _LABELS_SECONDS, 0, 256
    if split.block is None and not isinstance(split, DatasetSplit):
        part = len(split)  # labels are read as a whole anyway
    while labelled < len(split) and time.perf_counter() < end:
        batch = split.read_batch(labelled, min(labelled + part, len(split)))
        labels = _labels_of(batch)
        if labels is None or labels.dtype.kind not in "iu" or labels.ndim != 1:
            return None, 0
        counts.update(labels.tolist())
        labelled += batch.count
    return (dict(sorted(counts.items())) if len(counts) <= (split.classes or _FEW_LABELS) else None), labelled


def _labels_of(batch: Batch) -> Any:
    if not isinstance(batch, CollatedBatch):
        return batch.labels
    tree = batch.examples
    if isinstance(tree, dict):
        label = next((tree[name] for name in ("labels", "label", "targets", "target", "cls") if name in tree), None)
    else:
        label = tree[-1] if isinstance(tree, (tuple, list)) and len(tree) > 1 else None
    return np.asarray(label) if hasattr(label, "shape") else None


def _example(tree: Any, index: int) -> Any:
    """Return an example of a batch."""
    is_list_of_strings = isinstance(tree, list) and isinstance(tree[0], (str, bytes))
    if hasattr(tree, "shape") or is_list_of_strings:
        return tree[index]
    return map_children(lambda child: _example(child, index), tree)


def _size(batch: Batch) -> int:
    tree = batch.examples if isinstance(batch, CollatedBatch) else (batch.examples, batch.labels)
    return sum(int(getattr(leaf, "nbytes", 0)) for leaf in leaves(tree))
