"""The state in which training begins: initial values, or the values of a checkpoint or of a state in memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from .. import checkpoint
from ..checkpoint import Restored
from ..checkpoint.resume import ResumePlan
from ..comm.cluster import Cluster
from ..comm.mpi import MPI
from ..core.extra_state import StoredState
from ..core.layout import Array
from ..errors import CheckpointError, ConfigError
from ..plan.network import Network
from ..plan.plan import Plan
from ..plan.progress import Progress
from ..strategy.base import SharedVectors
from .memory_recovery import resume_from_memory


@dataclass(frozen=True)
class Beginning:
    """The state in which training begins; the same on all ranks.

    Attributes:
        extra_state: The extra state of the resumed run.
        resumed: The checkpoint that training resumes from, or "memory"; None if it does not resume.
        saved: Whether that checkpoint is the run's own and need not be saved again.
        skipped: One line for each newer checkpoint that was skipped, with the reason.
    """

    progress: Progress
    extra_state: StoredState = field(default_factory=StoredState)
    resumed: str | None = None
    saved: bool = False
    skipped: tuple[str, ...] = ()

    def is_complete(self, plan: Plan) -> bool:
        """Return whether the run's own checkpoint has all steps, so that there is nothing to train."""
        return self.saved and self.progress.step >= plan.train_steps


def restore(
    cluster: Cluster,
    plan: Plan,
    network: Network,
    resume_plan: ResumePlan,
    vectors: dict[str, Array] | None,
    shared_vectors: SharedVectors | None = None,
    run_dir: str | None = None,
) -> Beginning:
    """Fill the vectors with initial values, or from a checkpoint or memory. Collective over all ranks.

    A checkpoint is read once, and its digests are verified while reading. With ``resume_plan.auto``, all ranks skip a
    checkpoint that is damaged on any rank, and try the previous one.

    Args:
        vectors: ``Strategy.initial_vectors``; at least one rank must have them.
        shared_vectors: ``Strategy.shared_vectors``.
        run_dir: See ``kept_run_dir``.

    Raises:
        CheckpointError: No checkpoint is intact, or the newest intact one does not match the model; on every rank.
    """
    kept = resume_from_memory(cluster, plan, vectors, shared_vectors, run_dir, newer_than=resume_plan.step)
    if kept is not None:
        beginning = Beginning(*kept, resumed="memory")
    elif resume_plan.resume:
        beginning = _resume(cluster, plan, resume_plan, vectors)
    else:
        _initialize(cluster, plan, network, resume_plan.init_from, vectors)
        beginning = Beginning(Progress(0, 0))
    root = cluster.comm.allreduce(cluster.size if vectors is None else cluster.rank, op=MPI.MIN)
    if root == cluster.size:
        raise ConfigError(
            "no rank has initial_vectors: the strategy must set them on the first rank of each node", on_all_ranks=True
        )
    beginning = cluster.comm.bcast(beginning, root=root)
    plan.length.begin(beginning.progress)
    return beginning


def _resume(cluster: Cluster, plan: Plan, resume_plan: ResumePlan, vectors: dict[str, Array] | None) -> Beginning:
    """Read the requested checkpoint, or the newest undamaged one."""
    paths, read = resume_plan.resume, partial(_read, cluster, plan, vectors)
    if not resume_plan.auto:
        return Beginning(*read(paths[0]), resumed=str(paths[0]), saved=resume_plan.saved)
    # All ranks agree on which checkpoints are damaged, so that all continue with the same checkpoint.
    intact, skipped = checkpoint.first_intact(paths, read)
    if intact is None:
        raise CheckpointError(
            f"all {len(paths)} checkpoints in {paths[0].parent} are damaged: {skipped[0]}; "
            "start from the beginning with --resume never, or pass another --run-dir",
            on_all_ranks=True,
        )
    path, restored = intact
    return Beginning(*restored, resumed=str(path), saved=resume_plan.saved, skipped=tuple(skipped))


def _read(cluster: Cluster, plan: Plan, vectors: dict[str, Array] | None, path: Path) -> Restored:
    """Fill the vectors from a checkpoint.

    Raises:
        DamagedCheckpoint: On every rank: a rank has found damage in the checkpoint.
    """
    restored = Restored(Progress(0, 0), StoredState())
    with cluster.agree("reading a checkpoint"):
        if vectors is not None:
            _clear(vectors)  # also overwrites values read from a damaged checkpoint
            restored = checkpoint.read(path, plan.layout, vectors, plan.config.training.seed)
    return restored


def _initialize(
    cluster: Cluster, plan: Plan, network: Network, init_from: Path | None, vectors: dict[str, Array] | None
) -> None:
    """Set initial values; ``init_from`` is a file that contains some of them."""
    with cluster.agree("initializing"):
        if vectors is not None:
            _clear(vectors)
            network.initialize(plan.layout, vectors["params"], plan.config.training.seed)
            if init_from is not None:
                checkpoint.load_matching(init_from, plan.layout, vectors["params"])
            if "average" in vectors:
                vectors["average"][:] = vectors["params"]


def _clear(vectors: dict[str, Array]) -> None:
    """Set vectors to zero: a checkpoint does not cover gaps between layers, and layer state has no slots."""
    for vector in vectors.values():
        vector[:] = 0
