"""Options for the agreement of workers on the parameters."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from ..errors import ConfigError
from .modes import MODES, Mode
from .option import OptionGroup, flag, option

# Defaults of options that are None unless the user sets them, so that an option of another mode can be refused. Only
# the members of ParallelConfig apply these defaults.
STALENESS = 3
BACKUP_WORKERS = 1
LOCAL_STEPS = 8
OUTER_LEARNING_RATE = 0.7
OUTER_MOMENTUM = 0.9


_OUTER_OPTIONS = ("outer_learning_rate", "outer_momentum", "fragments", "overlap_steps")


def _with_own_params(mode: Mode) -> bool:
    return mode.averages_params


@dataclass(frozen=True)
class ParallelConfig(OptionGroup):
    """How workers agree on the parameters."""

    mode: str = option("sync", f"{', '.join(MODES)}; or MODULE:CLASS, a strategy of your own.", "MODE", is_common=True)
    staleness: int | None = option(
        None,
        "Maximum number of steps that a worker may be ahead of the slowest worker.",
        "S",
        minimum=0,
        default_text=STALENESS,
        modes=lambda mode: mode.bounds_staleness,
    )
    staleness_scaling: bool = option(
        False, "Divide the learning rate by the gradient's staleness.", modes=lambda mode: mode.is_asynchronous
    )
    backup_workers: int | None = option(
        None,
        "Number of spare workers B; a step uses the first N-B gradients.",
        "B",
        minimum=0,
        default_text=BACKUP_WORKERS,
        modes=lambda mode: mode.drops_late_gradients,
    )
    local_steps: int | None = option(
        None, "Steps between two parameter averages.", "H", minimum=1, default_text=LOCAL_STEPS, modes=_with_own_params
    )
    elastic_rho: float | None = option(
        None,
        "Elastic averaging: move the workers' parameters and a center towards each other by this fraction.",
        "RHO",
        above=0,
        below=1,
        modes=_with_own_params,
    )
    local_after: int | None = option(
        None,
        "Average gradients in every step, as sync does, before this step.",
        "STEP",
        minimum=0,
        default_text=0,
        modes=_with_own_params,
    )
    outer_optimizer: Literal["sgd", "nesterov"] | None = option(
        None,
        "Instead of averaging, update global parameters with the workers' mean change (DiLoCo).",
        default_text="average parameters and slots",
        modes=_with_own_params,
    )
    outer_learning_rate: float | None = option(
        None,
        "Learning rate of the outer optimizer.",
        "RATE",
        above=0,
        below=math.inf,
        default_text=OUTER_LEARNING_RATE,
        modes=_with_own_params,
    )
    outer_momentum: float | None = option(
        None,
        "Momentum of --outer-optimizer nesterov.",
        "MOMENTUM",
        minimum=0,
        below=1,
        default_text=OUTER_MOMENTUM,
        modes=_with_own_params,
    )
    fragments: int | None = option(
        None,
        "With an outer optimizer: exchange the model in N parts, one after the other.",
        "N",
        minimum=1,
        default_text=1,
        modes=_with_own_params,
    )
    overlap_steps: int | None = option(
        None,
        "With an outer optimizer: begin each exchange N steps before its result is used.",
        "N",
        minimum=0,
        default_text=0,
        modes=_with_own_params,
    )
    shared_memory: bool = option(True, "Average gradients in memory shared by the ranks of a node.")
    compress: str | None = option(
        None,
        "Compress gradients between nodes, with error feedback: bfloat16, float16, int8, or float32 (of float64). "
        "Only in local: int4. Only in sync: powersgd:RANK. Only with servers: topk:FRACTION. package.module:Class is a "
        "codec of your own.",
        "CODEC",
        modes=lambda mode: bool(mode.compressions),
    )
    compress_after: int = option(
        0,
        "Step at which --compress starts to compress.",
        "STEP",
        minimum=0,
        modes=lambda mode: "powersgd" in mode.compressions,
    )
    bucket_bytes: int = option(1 << 20, "Minimum size of a gradient bucket in bytes.", "BYTES", minimum=0)

    @property
    def max_staleness(self) -> int:
        """``staleness``, or its default."""
        return STALENESS if self.staleness is None else self.staleness

    @property
    def steps_per_average(self) -> int:
        """``local_steps``, or its default."""
        return LOCAL_STEPS if self.local_steps is None else self.local_steps

    @property
    def first_local_step(self) -> int:
        """``local_after``, or its default."""
        return self.local_after or 0

    @property
    def n_fragments(self) -> int:
        """``fragments``, or its default."""
        return self.fragments or 1

    @property
    def steps_of_overlap(self) -> int:
        """``overlap_steps``, or its default."""
        return self.overlap_steps or 0

    @property
    def outer_rate(self) -> float:
        """``outer_learning_rate``, or its default."""
        return OUTER_LEARNING_RATE if self.outer_learning_rate is None else self.outer_learning_rate

    @property
    def outer_momentum_factor(self) -> float:
        """``outer_momentum``, or its default."""
        return OUTER_MOMENTUM if self.outer_momentum is None else self.outer_momentum

    @property
    def first_outer_update(self) -> int:
        """The number of steps after which the outer optimizer updates parameters for the first time."""
        steps, overlap, first = self.steps_per_average, self.steps_of_overlap, self.first_local_step + 1
        merges = ((index + 1) * steps // self.n_fragments for index in range(self.n_fragments))
        return min(first + (merge - overlap - first) % steps + overlap for merge in merges)

    def spare_workers(self, workers: int) -> int:
        """Return ``backup_workers``, or its default, which leaves at least one of ``workers``."""
        return min(BACKUP_WORKERS, workers - 1) if self.backup_workers is None else self.backup_workers

    def check_outer_optimizer(self, mode: Mode) -> None:
        """Reject options that need an outer optimizer if there is none, and schedules in which exchanges overlap.

        Raises:
            ConfigError: The options contradict each other.
        """
        if self.outer_optimizer is None:
            for name in (*_OUTER_OPTIONS, *(["compress"] if mode.averages_params else [])):
                if (value := getattr(self, name)) is not None:
                    raise ConfigError(
                        f"{flag(name)} {value} requires --outer-optimizer; pass --outer-optimizer nesterov, or remove "
                        f"{flag(name)}"
                    )
            return
        if self.elastic_rho is not None:
            raise ConfigError(
                f"--elastic-rho {self.elastic_rho} cannot be combined with --outer-optimizer "
                f"{self.outer_optimizer}; remove one"
            )
        if self.outer_optimizer == "sgd" and self.outer_momentum is not None:
            raise ConfigError(
                f"--outer-momentum {self.outer_momentum} has no effect on --outer-optimizer sgd; use nesterov, or "
                "remove --outer-momentum"
            )
        steps, fragments, overlap = self.steps_per_average, self.n_fragments, self.steps_of_overlap
        if fragments > steps:
            raise ConfigError(
                f"--fragments {fragments} exceeds --local-steps {steps}: one fragment at most is exchanged in a step; "
                "use fewer fragments or more local steps"
            )
        if overlap >= steps // fragments:
            raise ConfigError(
                f"--overlap-steps {overlap} with {steps} local steps and {fragments} fragment{'s' * (fragments != 1)}: "
                f"must be <= {steps // fragments - 1}, so that an exchange ends before the next one begins"
            )
