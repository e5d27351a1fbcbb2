"""Where training starts: the model's initial values, or those of a checkpoint."""

from __future__ import annotations

from pathlib import Path

from .. import checkpoint
from ..checkpoint.resume import ResumePlan
from ..comm.cluster import Cluster
from ..core.layout import Array
from ..errors import CheckpointError
from ..nn.layer import Layer, initialize
from ..plan.plan import Plan
from ..plan.progress import Progress


class InitialStateLoader:
    """Gives vectors their first values: a ``strategy.base.InitialState``. Every rank has one, and calls it once.

    A checkpoint is read once, and its digests are checked as it is: what turns out damaged on any rank is passed over
    by all, and the one before it takes its place.

    Attributes:
        resumed: The checkpoint that training goes on from, or None; known when the values are there.
        saved: Whether that is one of the run's own, which need not be saved again.
        passed_over: Why newer ones were not taken, a line each.
    """

    def __init__(self, cluster: Cluster, plan: Plan, model: Layer, begin: ResumePlan) -> None:
        self._cluster, self._plan, self._model, self._begin = cluster, plan, model, begin
        self.resumed: Path | None = None
        self.skipped: list[str] = []

    @property
    def saved(self) -> bool:
        return self.resumed is not None and self._begin.saved

    def __call__(self, vectors: dict[str, Array] | None, root: int) -> Progress:
        """Fill the vectors where they are given, and return how far that is; collective over all ranks.

        Args:
            vectors: Flat vectors, shape (layout.size,), by name; None on ranks that hold none of their own.
            root: A rank that holds some.

        Raises:
            CheckpointError: On every rank: no checkpoint is whole, or the newest that is does not fit the model.
        """
        reached = self._resume(vectors) if self._begin.resume else self._initialize(vectors)
        found: Progress = self._cluster.comm.bcast(reached, root=root)
        return found

    def _resume(self, vectors: dict[str, Array] | None) -> Progress:
        """Read the newest checkpoint that is whole."""
        paths = self._begin.resume
        if not self._begin.auto:
            self.resumed = paths[0]
            return self._read(paths[0], vectors)
        # A damaged one is met by all ranks alike, so that all go on to the same.
        found, self.skipped = checkpoint.first_intact(paths, lambda path: self._read(path, vectors))
        if found is None:
            none = CheckpointError(
                f"none of the {len(paths)} checkpoints in {paths[0].parent} is whole: {self.skipped[0]}; "
                "give --resume never to begin anew, or another --run-dir"
            )
            none.on_all_ranks = True
            raise none
        self.resumed, reached = found
        return reached

    def _read(self, path: Path, vectors: dict[str, Array] | None) -> Progress:
        """Fill the vectors from a checkpoint.

        Raises:
            DamagedCheckpoint: On every rank: it is not as it was written, as one of them has found.
        """
        reached = Progress(0, 0, {})
        with self._cluster.agree("reading a checkpoint"):
            if vectors is not None:
                _clear(vectors)  # of what a damaged one has left, too
                reached = checkpoint.read(path, self._plan.layout, vectors, self._plan.config.seed)
        return reached

    def _initialize(self, vectors: dict[str, Array] | None) -> Progress:
        plan, init_from = self._plan, self._begin.init_from
        with self._cluster.agree("initializing"):
            if vectors is not None:
                _clear(vectors)
                initialize(self._model, plan.layout, vectors["params"], plan.config.seed)
                if init_from is not None:
                    checkpoint.load_matching(init_from, plan.layout, vectors["params"])
                if "average" in vectors:
                    vectors["average"][:] = vectors["params"]
        return Progress(0, 0, {})


def _clear(vectors: dict[str, Array]) -> None:
    """Not all of a vector is in a checkpoint: there are gaps between layers, and state has no slots."""
    for vector in vectors.values():
        vector[:] = 0
