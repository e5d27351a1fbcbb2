"""The consistency modes: how workers agree on the parameters.

To add a mode, write a strategy (``strategy.base.Strategy``), and add the mode with its properties to ``MODES``. The
metadata of an option says which property makes it valid (``OptionInfo.modes``).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from ..core.words import suggestion
from ..errors import ConfigError

_STRATEGY = "mpitrain.strategy"


@dataclass(frozen=True)
class Mode:
    """A consistency mode.

    Attributes:
        name: The value of ``--mode``.
        strategy: The class or function that makes a worker's strategy, ``package.module:name``; it takes ``(cluster,
            plan, devices, state)``.
        uses_servers: Whether workers run at their own pace, with the parameters on servers or in one node's shared
            memory.
        is_asynchronous: Whether a worker's gradient is applied without waiting for other workers' gradients.
        bounds_staleness: Whether workers wait for the slowest worker; the staleness of a gradient is then the worker's
            lead over the slowest worker.
        drops_late_gradients: Whether a step uses the first gradients of several workers, and drops later ones.
        averages_params: Whether workers train parameters of their own, which are averaged in place of gradients.
        keeps_vectors_on_gpus: Whether the vectors are on every worker's GPU if all workers have GPUs. float16 requires
            this, because its loss scale is the same on all GPUs.
        simulation: The module that simulates the mode, in ``predict.modes``; empty if its speed cannot be predicted.
    """

    name: str
    strategy: str
    uses_servers: bool = False
    is_asynchronous: bool = False
    bounds_staleness: bool = False
    drops_late_gradients: bool = False
    averages_params: bool = False
    keeps_vectors_on_gpus: bool = False
    simulation: str = ""

    @property
    def averages_gradients(self) -> bool:
        """Whether every step uses the mean of all workers' gradients, without servers."""
        return not self.uses_servers and not self.averages_params

    @property
    def keeps_steps(self) -> bool:
        """Whether a run has virtual workers by default, if it may continue on fewer ranks."""
        return self.averages_gradients and self.name in MODES


# In the order in which help and messages list them.
MODES = {
    mode.name: mode
    for mode in (
        Mode("sync", f"{_STRATEGY}.select:sync_strategy", keeps_vectors_on_gpus=True, simulation="sync"),
        Mode(
            "async",
            f"{_STRATEGY}.ps.asynchronous:make_strategy",
            uses_servers=True,
            is_asynchronous=True,
            simulation="asynchronous",
        ),
        Mode(
            "ssp",
            f"{_STRATEGY}.ps.asynchronous:make_strategy",
            uses_servers=True,
            is_asynchronous=True,
            bounds_staleness=True,
            simulation="asynchronous",
        ),
        Mode(
            "backup",
            f"{_STRATEGY}.ps.backup:make_strategy",
            uses_servers=True,
            drops_late_gradients=True,
            simulation="backup",
        ),
        Mode("local", f"{_STRATEGY}.local:Local", averages_params=True, simulation="local"),
    )
}


def find_mode(name: str) -> Mode:
    """Return a mode by its name. The user's own class, ``package.module:Class``, has the options of ``sync`` on CPUs.

    Raises:
        ConfigError: There is no such mode.
    """
    if name in MODES:
        return MODES[name]
    if re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", name):
        return Mode(name, name)
    hint = suggestion(name, MODES)
    raise ConfigError(f"--mode is {name!r}: must be {', '.join(MODES)}, or package.module:Class{hint}")


def names_of_modes(has_property: Callable[[Mode], bool]) -> tuple[str, ...]:
    """Return the names of the modes for which ``has_property`` is true."""
    return tuple(mode.name for mode in MODES.values() if has_property(mode))
