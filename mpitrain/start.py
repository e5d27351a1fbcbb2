"""Where training starts: the model's initial values, or those of a checkpoint."""

from __future__ import annotations

from pathlib import Path

from . import checkpoint
from .cluster import Group
from .nn.layer import Layer, initialize
from .params import Array
from .plan import Plan
from .strategy.base import Fill


def start_values(group: Group, plan: Plan, model: Layer, resume: Path | None, init_from: Path | None = None) -> Fill:
    """What gives vectors their first values; collective over the group.

    Args:
        resume: The checkpoint to go on from; None for initial values.
        init_from: The checkpoint whose parameters are taken in place of initial values, as far as they fit.
    """

    def fill(vectors: dict[str, Array] | None, root: int) -> tuple[int, int]:
        reached = (0, 0)
        with group.agree("reading a checkpoint" if resume else "initializing"):
            if vectors is not None:
                for vector in vectors.values():
                    vector[:] = 0
                if resume is not None:
                    reached = checkpoint.read(resume, plan.layout, vectors, plan.config.seed)
                else:
                    _initialize(model, plan, vectors, init_from)
        found: tuple[int, int] = group.comm.bcast(reached, root=root)
        return found

    return fill


def _initialize(model: Layer, plan: Plan, vectors: dict[str, Array], init_from: Path | None) -> None:
    initialize(model, plan.layout, vectors["params"], plan.config.seed)
    if init_from is not None:
        checkpoint.take_fitting(init_from, plan.layout, vectors["params"])
    if "average" in vectors:
        vectors["average"][:] = vectors["params"]
