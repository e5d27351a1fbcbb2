"""The consistency modes: how workers agree on the parameters, and which options they have.

To add a mode, add it to ``MODES``; ``strategy.select`` makes its strategy.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, replace

from ..errors import ConfigError

_ON_SERVERS = ("ps", "ps_hosts", "ps_placement", "placement", "one_sided", "push_precision")
_SAVED_BY_NODES = ("save_per_node", "save_one_file")


@dataclass(frozen=True)
class Mode:
    """A consistency mode.

    Attributes:
        name: The value of ``--mode``.
        options: The options that are valid in this mode, but not in all modes.
        is_asynchronous: Whether a worker's gradient is applied without waiting for those of other workers.
        scales_loss: Whether all workers agree on a loss scale, which float16 needs.
    """

    name: str
    options: tuple[str, ...]
    is_asynchronous: bool = False
    scales_loss: bool = False

    @property
    def uses_servers(self) -> bool:
        """Whether parameters live on servers, or in a node's shared memory, and workers run at their own pace."""
        return "ps" in self.options


# In the order in which help and messages list them.
MODES = {
    mode.name: mode
    for mode in (
        Mode("sync", (*_SAVED_BY_NODES, "gpu_transport"), scales_loss=True),
        Mode("async", (*_ON_SERVERS, "staleness_scaling"), is_asynchronous=True),
        Mode("ssp", (*_ON_SERVERS, "staleness_scaling", "staleness"), is_asynchronous=True),
        Mode("backup", (*_ON_SERVERS, "backup_workers")),
        Mode("local", (*_SAVED_BY_NODES, "local_steps", "elastic_rho")),
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
        return replace(MODES["sync"], name=name, scales_loss=False)
    near = difflib.get_close_matches(name, MODES, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ConfigError(f"--mode is {name!r}: must be {', '.join(MODES)}, or package.module:Class{hint}")


def modes_with(option: str) -> tuple[str, ...]:
    """Return the names of the modes in which an option is valid; empty if it is valid in all modes."""
    return tuple(mode.name for mode in MODES.values() if option in mode.options)
