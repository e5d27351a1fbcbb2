"""Options for the agreement of workers on the parameters."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from ..core.words import counted
from ..errors import ConfigError
from .compression import values_by_mode
from .modes import MODES, Mode
from .option import OptionGroup, option, value_of

_STEPS_PER_AVERAGE, _STEPS_PER_EXCHANGE = 8, 64


def _with_own_params(mode: Mode) -> bool:
    return mode.averages_params


@dataclass(frozen=True)
class ParallelConfig(OptionGroup):
    """How workers agree on the parameters."""

    mode: str = option(
        "sync",
        f"{', '.join(MODES)}; or MODULE:CLASS, a strategy of your own.",
        "MODE",
        is_common=True,
        is_simulated=True,
        change="mode",
    )
    virtual_workers: int | None = option(
        None,
        "Workers of a step, computed by as many workers as there are, with the same result; 0: those that there are.",
        "V",
        minimum=0,
        if_none=0,
        modes=lambda mode: not mode.uses_servers,
    )
    staleness: int | None = option(
        None,
        "Maximum number of steps that a worker may be ahead of the slowest worker.",
        "S",
        minimum=0,
        if_none=3,
        modes=lambda mode: mode.bounds_staleness,
        is_simulated=True,
        change="staleness",
        tried=(1, 3, 8),
    )
    staleness_scaling: bool = option(
        False, "Divide the learning rate by the gradient's staleness.", modes=lambda mode: mode.is_asynchronous
    )
    backup_workers: int | None = option(
        None,
        "Number of spare workers B; a step uses the first N-B gradients.",
        "B",
        minimum=0,
        if_none=1,
        modes=lambda mode: mode.drops_late_gradients,
        is_simulated=True,
    )
    local_steps: int | None = option(
        None,
        "Steps between two parameter averages.",
        "H",
        minimum=1,
        if_none=_STEPS_PER_AVERAGE,
        default_text=f"{_STEPS_PER_AVERAGE}, with --join {_STEPS_PER_EXCHANGE}",
        modes=_with_own_params,
        with_join=True,
        is_simulated=True,
        change="local-steps",
        tried=(8, 32),
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
        if_none=0,
        modes=_with_own_params,
    )
    outer_optimizer: Literal["sgd", "nesterov"] | None = option(
        None,
        "Instead of averaging, update global parameters with the workers' mean change (DiLoCo).",
        default_text="average parameters and slots, with --join nesterov",
        modes=_with_own_params,
        with_join=True,
        is_simulated=True,
        change="local-steps",
        tried=("nesterov",),
    )
    outer_learning_rate: float | None = option(
        None,
        "Learning rate of the outer optimizer.",
        "RATE",
        above=0,
        below=math.inf,
        if_none=0.7,
        modes=_with_own_params,
        with_join=True,
        requires="outer_optimizer",
    )
    outer_momentum: float | None = option(
        None,
        "Momentum of --outer-optimizer nesterov.",
        "MOMENTUM",
        minimum=0,
        below=1,
        if_none=0.9,
        modes=_with_own_params,
        with_join=True,
        requires="outer_optimizer",
    )
    fragments: int | None = option(
        None,
        "With an outer optimizer: exchange the model in N parts, one after the other.",
        "N",
        minimum=1,
        if_none=1,
        modes=_with_own_params,
        with_join=True,
        requires="outer_optimizer",
        is_simulated=True,
    )
    overlap_steps: int | None = option(
        None,
        "With an outer optimizer: begin each exchange N steps before its result is used.",
        "N",
        minimum=0,
        if_none=0,
        modes=_with_own_params,
        requires="outer_optimizer",
        is_simulated=True,
    )
    shared_memory: bool = option(True, "Average gradients in memory shared by the ranks of a node.")
    compress: str | None = option(
        None,
        f"Compress gradients between nodes, with error feedback: {values_by_mode()} package.module:Class is a codec of "
        "your own.",
        "CODEC",
        is_simulated=True,
        change="compression",
    )
    compress_after: int = option(
        0,
        "Step at which --compress starts to compress.",
        "STEP",
        minimum=0,
        modes=lambda mode: mode.averages_gradients,
        requires="compress",
    )
    bucket_bytes: int = option(
        1 << 20,
        "Minimum size of a gradient bucket in bytes.",
        "BYTES",
        minimum=0,
        is_simulated=True,
        change="",
        tried=(1 << 18, 1 << 20, 1 << 22, 1 << 24),
        tried_in=lambda mode: mode.averages_gradients,
    )

    n_virtual_workers = value_of("virtual_workers")
    max_staleness = value_of("staleness")
    steps_per_average = value_of("local_steps")
    first_local_step = value_of("local_after")
    n_fragments = value_of("fragments")
    steps_of_overlap = value_of("overlap_steps")
    outer_rate = value_of("outer_learning_rate")
    outer_momentum_factor = value_of("outer_momentum")
    most_spare_workers = value_of("backup_workers")

    @property
    def steps_per_exchange(self) -> int:
        """Steps of a learner (``--join``) between two contributions to the same fragment."""
        return self.local_steps or _STEPS_PER_EXCHANGE

    @property
    def first_outer_update(self) -> int:
        """The number of steps after which the outer optimizer updates parameters for the first time."""
        steps, overlap, first = self.steps_per_average, self.steps_of_overlap, self.first_local_step + 1
        merges = ((index + 1) * steps // self.n_fragments for index in range(self.n_fragments))
        return min(first + (merge - overlap - first) % steps + overlap for merge in merges)

    def spare_workers(self, workers: int) -> int:
        """Return the number of spare workers of ``workers``; the default leaves at least one that is not spare."""
        return min(self.most_spare_workers, workers - 1)

    def check_outer_optimizer(self, mode: Mode, joins: bool = False) -> None:
        """Reject options that need an outer optimizer if there is none, and schedules in which exchanges overlap.

        Args:
            joins: Whether the run is a learner (``--join``), which always has an outer optimizer.

        Raises:
            ConfigError: The options contradict each other.
        """
        if self.outer_optimizer is None and not joins:
            if self.compress is not None and mode.averages_params:
                raise ConfigError(
                    f"--compress {self.compress} requires --outer-optimizer in local: add it, or remove --compress"
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
        steps = self.steps_per_exchange if joins else self.steps_per_average
        fragments, overlap = self.n_fragments, self.steps_of_overlap
        if fragments > steps:
            raise ConfigError(
                f"--fragments {fragments} exceeds --local-steps {steps}: one fragment at most is exchanged in a step; "
                "use fewer fragments or more local steps"
            )
        if overlap >= steps // fragments:
            raise ConfigError(
                f"--overlap-steps {overlap} with {steps} local steps and {counted(fragments, 'fragment')}: "
                f"must be <= {steps // fragments - 1}, so that an exchange ends before the next one begins"
            )
