"""The consistency modes: how workers agree on the parameters, and which options they have.

To add a mode, write its strategy (``strategy.base.Strategy``), and add it to ``MODES``.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from ..errors import ConfigError

_ON_SERVERS = ("ps", "ps_hosts", "ps_placement", "placement", "one_sided", "push_precision")
_SAVED_BY_NODES = ("save_per_node", "save_one_file")
_SYNC = (*_SAVED_BY_NODES, "gpu_transport")
_STRATEGY = "mpitrain.strategy"
_WITH_SERVERS = f"{_STRATEGY}.select:strategy_with_servers"


@dataclass(frozen=True)
class Mode:
    """A consistency mode.

    Attributes:
        name: The value of ``--mode``.
        strategy: What makes a worker's strategy, ``package.module:name``: a class or a function that takes
            ``(cluster, plan, devices, state)``.
        options: The options that are valid in this mode, but not in all modes.
        is_asynchronous: Whether a worker's gradient is applied without waiting for those of other workers.
        averages_params: Whether workers train parameters of their own, which are averaged in place of gradients.
        keeps_vectors_on_gpus: Whether the vectors are on every worker's GPU if all have one. float16 requires this,
            because its loss scale is the same on all GPUs.
    """

    name: str
    strategy: str
    options: tuple[str, ...] = ()
    is_asynchronous: bool = False
    averages_params: bool = False
    keeps_vectors_on_gpus: bool = False

    @property
    def uses_servers(self) -> bool:
        """Whether parameters live on servers, or in a node's shared memory, and workers run at their own pace."""
        return "ps" in self.options


# In the order in which help and messages list them.
MODES = {
    mode.name: mode
    for mode in (
        Mode("sync", f"{_STRATEGY}.select:sync_strategy", _SYNC, keeps_vectors_on_gpus=True),
        Mode("async", _WITH_SERVERS, (*_ON_SERVERS, "staleness_scaling"), is_asynchronous=True),
        Mode("ssp", _WITH_SERVERS, (*_ON_SERVERS, "staleness_scaling", "staleness"), is_asynchronous=True),
        Mode("backup", _WITH_SERVERS, (*_ON_SERVERS, "backup_workers")),
        Mode(
            "local", f"{_STRATEGY}.local:Local", (*_SAVED_BY_NODES, "local_steps", "elastic_rho"), averages_params=True
        ),
    )
}


def find_mode(name: str) -> Mode:
    """Return a mode by its name. A strategy of the user's own, ``package.module:Class``, has the options of ``sync``.

    Raises:
        ConfigError: There is no such mode.
    """
    if name in MODES:
        return MODES[name]
    if re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", name):
        return Mode(name, name, _SYNC)
    near = difflib.get_close_matches(name, MODES, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ConfigError(f"--mode is {name!r}: must be {', '.join(MODES)}, or package.module:Class{hint}")


def modes_with(option: str) -> tuple[str, ...]:
    """Return the names of the modes in which an option is valid; empty if it is valid in all modes."""
    return tuple(mode.name for mode in MODES.values() if option in mode.options)
