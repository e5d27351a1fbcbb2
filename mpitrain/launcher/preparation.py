"""Check a request, and convert its flags to the arguments that start the ranks."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from ..batch_systems.registry import allocated_hosts, allocated_ranks, allocation
from ..core.words import counted
from ..errors import ConfigError, LaunchError
from ..plan.launch_options import LaunchOptions
from ..plan.request import LaunchRequest, Workload
from ..process.network import parse_subnet
from . import bad_hosts
from .hosts import Host, assign_ranks, is_local, parse_hosts, read_hostfile
from .mpi_flavors import find_launcher
from .mpi_launcher import Launcher, LaunchSpec, LocalMachine
from .terminal import say


def prepare(request: LaunchRequest) -> tuple[LocalMachine, Launcher, LaunchSpec]:
    """Return the local machine, the launcher, and the launch spec of the ranks.

    Raises:
        LaunchError, ConfigError: The ranks cannot be started as requested.
    """
    options, workload = request.options, request.workload
    machine, launcher = LocalMachine.detect(), find_launcher()
    bad = bad_hosts.of(options, workload.run_dir)
    spec = replace(make_launch_spec(options, launcher, machine, bad), may_spawn=workload.command == "exec")
    machine = resolve_allocation(machine, launcher, spec)
    if spec.ranks is not None:
        workload.check_ranks(spec.ranks)
        if (options.debug or 0) >= spec.ranks:
            raise ConfigError(f"--debug {options.debug}: the ranks are 0 to {spec.ranks - 1}")
    check_restarts(options, spec, workload)
    return machine, launcher, spec


def make_launch_spec(
    options: LaunchOptions, launcher: Launcher, machine: LocalMachine, bad: Mapping[str, str] = MappingProxyType({})
) -> LaunchSpec:
    """Convert the flags to a launch spec.

    Args:
        bad: Hosts that are not used, with the reasons.

    Raises:
        LaunchError: The flags contradict each other, or the launcher does not support them.
    """
    named, spares = _named_hosts(options, machine, bad)
    hosts = None if named is None else assign_ranks(named, options.ranks)
    ranks = options.ranks if hosts is None else sum(host.slots for host in hosts)
    if ranks is None:
        ranks = allocated_ranks(machine.environ) or (None if machine.allocated else 1)
    agent, network = options.remote_agent, options.network
    if agent is not None and not launcher.agent_takes_arguments and len(shlex.split(agent)) != 1:
        raise LaunchError(f"--remote-agent {agent!r}: this MPI's launcher accepts only a program without arguments")
    if network is not None:
        parse_subnet(network)
        network = launcher.network_argument(network)
    try:
        words = shlex.split(options.launcher_args or "")
    except ValueError as error:
        raise LaunchError(f"--launcher-args {options.launcher_args!r}: {error}") from error
    return LaunchSpec(ranks, hosts, agent, network, _environment(options.env, machine), words, spares)


def _named_hosts(
    options: LaunchOptions, machine: LocalMachine, bad: Mapping[str, str]
) -> tuple[list[Host] | None, list[Host]]:
    """Return the hosts for ranks, None if the launcher determines them, and the spare hosts.

    Raises:
        LaunchError: The flags contradict each other, or there are too few hosts.
    """
    if options.hosts is not None and options.hostfile is not None:
        raise LaunchError("--hosts and --hostfile are both given; remove one")
    named: list[Host] | None = None
    if options.hosts is not None:
        named = parse_hosts(options.hosts)
    elif options.hostfile is not None:
        named = read_hostfile(options.hostfile)
    elif options.min_ranks is not None or options.spare_hosts:  # a restart must name hosts
        named = [Host(*host) for host in allocated_hosts(machine.environ)] or None
    spares, left_out = options.spare_hosts, list[str]()
    if named is not None and (left_out := [host.name for host in named if host.name in bad]):
        others, needed = [host for host in named if host.name not in bad], options.ranks or options.min_ranks
        reasons = ", ".join(f"{name} ({bad[name]})" for name in left_out)
        if others and sum(host.slots or 1 for host in others) >= (needed or 1):
            say(f"not used, because of {bad_hosts.FILE}: {reasons}")
            named = others
        elif needed:
            say(f"used although in {bad_hosts.FILE}, because the other hosts have too few slots: {reasons}")
            left_out = []
        else:
            raise LaunchError(
                f"all hosts are in {bad_hosts.FILE} of the run directory: delete the lines of usable ones"
            )
    if spares and (named is None or len(named) + len(left_out) <= spares):
        raise LaunchError(
            f"--spare-hosts {spares} leaves no host of {len(named or ())}; name more by --hosts, --hostfile or an "
            "allocation of Slurm"
        )
    spares = max(0, spares - len(left_out))  # the others replace hosts that are left out
    return (named, []) if named is None or not spares else (named[:-spares], named[-spares:])


def _environment(settings: Sequence[str], machine: LocalMachine) -> dict[str, str]:
    """Return the variables that the values of ``--env`` set on the ranks."""
    variables = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not name.isidentifier() or not name.isascii():
            raise LaunchError(f"--env {setting}: {name!r} is not a valid variable name; give NAME or NAME=VALUE")
        if not equals and name not in machine.environ:
            raise LaunchError(f"--env {name}: {name} is not set in this environment; give --env {name}=VALUE")
        variables[name] = value if equals else machine.environ[name]
    return variables


def resolve_allocation(machine: LocalMachine, launcher: Launcher, spec: LaunchSpec) -> LocalMachine:
    """Return the machine; it ignores the allocation if that is this host alone and has too few tasks, or is not usable.

    A notebook or an editor often runs in a job with one task and several cores.

    Raises:
        LaunchError: The allocation cannot be used for these ranks.
    """
    system = allocation(machine.environ) if machine.allocated else None
    if system is None or spec.hosts is not None or spec.agent is not None:
        return machine
    node, tasks, ranks = system.only_node(machine.environ), system.allocated_ranks(machine.environ), spec.ranks
    is_here = bool(node) and is_local(node)
    if not system.can_start_ranks(machine.environ):
        if not is_here:
            name = system.allocation_variable
            raise LaunchError(f"{name} is set, but {system.title} does not answer on this host; unset {name}")
    elif ranks is None or tasks is None or ranks <= tasks or launcher.oversubscribe_word in spec.words:
        return machine
    elif not is_here or ranks > machine.cores:
        if not launcher.oversubscribe_word:
            return machine
        raise LaunchError(
            f"-n {ranks}: the allocation has {counted(tasks, 'task')}; request more, such as sbatch --ntasks {ranks}, "
            f"or pass --launcher-args {launcher.oversubscribe_word}"
        )
    return replace(machine, ignores_allocation=True)


def check_restarts(options: LaunchOptions, spec: LaunchSpec, workload: Workload) -> None:
    """Check that ``--min-ranks``, ``--spare-hosts`` and ``--recover`` can be satisfied.

    Raises:
        ConfigError: They cannot be satisfied, or have no effect.
    """
    if options.recover is not None:
        if not options.max_restarts:
            raise ConfigError(f"--recover {options.recover} has no effect without --max-restarts N; add --max-restarts")
        if not workload.keeps_checkpoints:
            raise ConfigError(f"--recover {options.recover} has no effect: a program resumes from its own checkpoints")
    if options.spare_hosts and not options.max_restarts:
        raise ConfigError("--spare-hosts has no effect without --max-restarts N; add it, or remove --spare-hosts")
    if options.min_ranks is None:
        return
    if not options.max_restarts:
        raise ConfigError("--min-ranks has no effect without --max-restarts N; add it, or remove --min-ranks")
    if spec.hosts is None:
        raise ConfigError("--min-ranks requires --hosts or --hostfile, or an allocation of Slurm")
    workload.check_ranks(options.min_ranks)
    if spec.ranks is not None and options.min_ranks > spec.ranks:
        raise ConfigError(f"--min-ranks {options.min_ranks} must be at most the number of ranks, {spec.ranks}")
