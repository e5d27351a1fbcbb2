"""Initial values of the training vectors: from the model's initializers or from a checkpoint."""

from __future__ import annotations

from pathlib import Path

from .. import checkpoint
from ..checkpoint.resume import ResumePlan
from ..comm.cluster import Cluster
from ..core.layout import Array
from ..errors import CheckpointError
from ..plan.network import Network
from ..plan.plan import Plan
from ..plan.progress import ExtraState, Progress


class InitialStateLoader:
    """Sets the initial values of vectors: a ``strategy.base.InitialState``. Every rank has one, and calls it once.

    A checkpoint is read once, and its digests are verified while reading. If any rank finds a checkpoint damaged, all
    ranks skip it and try the one before.

    Attributes:
        resumed: The checkpoint that training resumes from, or None; set by the call.
        extra_state: That of the resumed run; set by the call.
        step: Number of completed steps; set by the call.
        saved: Whether that checkpoint is the run's own and need not be saved again.
        skipped: One line for each newer checkpoint that was skipped, with the reason.
    """

    def __init__(self, cluster: Cluster, plan: Plan, network: Network, resume_plan: ResumePlan) -> None:
        self._cluster, self._plan, self._network, self._resume_plan = cluster, plan, network, resume_plan
        self.resumed: Path | None = None
        self.extra_state: ExtraState = {}
        self.step = 0
        self.skipped: list[str] = []

    @property
    def saved(self) -> bool:
        return self.resumed is not None and self._resume_plan.saved

    @property
    def nothing_to_train(self) -> bool:
        """Whether the run's own checkpoint has all steps; the same on all ranks."""
        return self.saved and self.step >= self._plan.train_steps

    def __call__(self, vectors: dict[str, Array] | None, root: int) -> Progress:
        """Fill the given vectors, and return the progress that they belong to. Collective over all ranks.

        Args:
            vectors: Flat vectors, shape (layout.size,), by name; None on ranks that hold none.
            root: A rank that holds some.

        Raises:
            CheckpointError: On every rank: all checkpoints are damaged, or the newest intact one does not fit.
        """
        progress = self._resume(vectors) if self._resume_plan.resume else self._initialize(vectors)
        found: Progress = self._cluster.comm.bcast(progress, root=root)
        self.extra_state, self.step = found.extra_state, found.step
        return found

    def _resume(self, vectors: dict[str, Array] | None) -> Progress:
        """Read the newest undamaged checkpoint."""
        paths = self._resume_plan.resume
        if not self._resume_plan.auto:
            self.resumed = paths[0]
            return self._read(paths[0], vectors)
        # All ranks agree on which checkpoints are damaged, so that all continue with the same one.
        found, self.skipped = checkpoint.first_intact(paths, lambda path: self._read(path, vectors))
        if found is None:
            none = CheckpointError(
                f"all {len(paths)} checkpoints in {paths[0].parent} are damaged: {self.skipped[0]}; "
                "start anew with --resume never, or pass another --run-dir"
            )
            none.on_all_ranks = True
            raise none
        self.resumed, progress = found
        return progress

    def _read(self, path: Path, vectors: dict[str, Array] | None) -> Progress:
        """Fill the vectors from a checkpoint.

        Raises:
            DamagedCheckpoint: On every rank: one of them found the checkpoint damaged.
        """
        progress = Progress(0, 0, {})
        with self._cluster.agree("reading a checkpoint"):
            if vectors is not None:
                _clear(vectors)  # also removes values read from a damaged checkpoint
                progress = checkpoint.read(path, self._plan.layout, vectors, self._plan.config.training.seed)
        return progress

    def _initialize(self, vectors: dict[str, Array] | None) -> Progress:
        plan, init_from = self._plan, self._resume_plan.init_from
        with self._cluster.agree("initializing"):
            if vectors is not None:
                _clear(vectors)
                self._network.initialize(plan.layout, vectors["params"], plan.config.training.seed)
                if init_from is not None:
                    checkpoint.load_matching(init_from, plan.layout, vectors["params"])
                if "average" in vectors:
                    vectors["average"][:] = vectors["params"]
        return Progress(0, 0, {})


def _clear(vectors: dict[str, Array]) -> None:
    """Set vectors to zero: a checkpoint does not cover gaps between layers, and layer state has no slots."""
    for vector in vectors.values():
        vector[:] = 0
