"""The batches of a worker, for training and for validation."""

from __future__ import annotations

from functools import partial

from ..comm.shared_dataset import SharedDataset
from ..data import BatchSource, InMemory, Loader, Split
from ..data.batch import Loading
from ..data.checks import check_examples
from ..data.loader import IndexLoader, own_buffers
from ..data.split import DatasetSplit
from ..data.stored_examples import StoredExamples
from ..models.base import Model
from .setup import Setup


class Batches:
    """The batches of a worker, in the form that its model prefers. Construction is collective over the workers.

    Attributes:
        training: The batches of training examples.
        validation: The batches of validation examples; None if the job has none.
    """

    def __init__(self, setup: Setup, model: Model) -> None:
        self._setup, plan, cluster, job = setup, setup.plan, setup.cluster, setup.job
        threads = plan.config.device.threads or cluster.threads
        self._dataset = SharedDataset(cluster.training, plan.config.parallel.shared_memory, threads)
        self.training = self._load("training", job.train_split, model)
        self.validation = None if job.validation_split is None else self._load("validation", job.validation_split)

    def close(self) -> None:
        """End the processes that load examples. Local."""
        self.training.close()
        if self.validation is not None:
            self.validation.close()

    def free(self) -> None:
        """Free the examples. Collective over the workers."""
        self._dataset.free()

    def _load(self, name: str, split: Split, model: Model | None = None) -> BatchSource:
        """Return the batches of a split, in the form that ``model``, if any, prefers. Collective over the workers."""
        setup, plan, dataset = self._setup, self._setup.plan, self._dataset
        training, network, workers = plan.config.training, setup.job.network, setup.cluster.workers
        seed, reuses_batches = training.seed, setup.request.loop.reuses_batches
        dtype = None if network.takes_integers(split) else plan.dtype
        check = partial(check_examples, name, split, dtype, network.classes)
        if isinstance(split, DatasetSplit) and isinstance(split.dataset, StoredExamples):
            arrays = split.dataset.split
            split = split.with_dataset(StoredExamples(arrays, dataset.load(arrays)))
        batch_dtype = None if model is not None and model.accepts_raw else dtype
        processes, batches = (training.n_data_workers, training.batches_ahead), plan.share_of(workers.rank).batches
        loading = Loading(*processes, workers.rank, workers.size, batch_dtype, check, batches)
        if (own := split.own_loader(seed, loading)) is not None:
            return own
        storage = dataset.load(split, check)
        if model is None:
            return Loader(split, storage, seed, dtype, reuse=reuses_batches)
        memory = model.memory if training.accumulate_steps * batches == 1 else own_buffers
        loader = Loader(split, storage, seed, batch_dtype, memory, plan.step_examples, reuses_batches, batches)
        if not reuses_batches or not isinstance(storage, InMemory):
            return loader
        examples, labels = storage.examples, storage.labels

        def cache() -> bool:
            if not model.has_room(examples, labels):
                return False
            model.cache_dataset(examples, labels)
            return True

        return IndexLoader(loader, cache)
