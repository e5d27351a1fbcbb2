"""The environment of a program: the variables that torchrun sets, for each rank."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ..process import launcher_env
from ..process.network import interface_of
from .world import World

_ROLE = "default"  # torchrun's default name of the ranks' role
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def environment_of(world: World, rank: int, run_dir: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a rank's program, to set in addition to the variables of the rank.

    The variables for threads, network interfaces, buffering of output and NCCL's errors are returned only if
    ``environ`` does not have them.

    Args:
        environ: The environment of the rank.
    """
    host = world.entries[rank].host
    ranks = world.ranks_on(host)
    size = str(len(world.entries))
    variables = {
        "RANK": str(rank),
        "LOCAL_RANK": str(ranks.index(rank)),
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": str(len(ranks)),
        "GROUP_RANK": str(world.hosts.index(host)),
        "GROUP_WORLD_SIZE": str(len(world.hosts)),
        "ROLE_NAME": _ROLE,
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": size,
        "MASTER_ADDR": world.address,
        "MASTER_PORT": str(world.port),
        "TORCHELASTIC_RUN_ID": run_dir.name,
        "TORCHELASTIC_RESTART_COUNT": environ.get(launcher_env.RESTART_COUNT, "0"),
        "TORCHELASTIC_MAX_RESTARTS": environ.get(launcher_env.MAX_RESTARTS, "0"),
    }
    defaults = {
        "OMP_NUM_THREADS": str(world.cores_of(rank)),
        "PYTHONUNBUFFERED": "1",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }
    if (network := environ.get(launcher_env.NETWORK)) is not None:
        defaults |= dict.fromkeys(_INTERFACES, interface_of(network))
    return {**{name: value for name, value in defaults.items() if name not in environ}, **variables}
