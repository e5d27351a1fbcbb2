"""``mpitrain exec``: a process as a rank that executes a program, and the environment of the program."""

from __future__ import annotations

import errno
import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from ..batch_systems.registry import end_of_time
from ..core import activity
from ..core.activity import ActivityPage
from ..core.cpus import SHOW_BINDING, crowd_warnings
from ..core.openblas import without_chosen
from ..core.words import counted
from ..errors import LaunchError, UserError
from ..monitor import heartbeat
from ..monitor.console import terminal_columns
from ..monitor.format import format_table
from ..monitor.rank_log import path_for
from ..monitor.run_record import PROGRAM, RunRecord
from ..plan.config import plain
from ..plan.program import ProgramOptions, ProgramRequest
from ..process import launcher_env
from ..process.launcher_env import attempt_id, launched_rank, launched_size
from ..process.network import interface_of
from ..process.rank_status import MEETING, RUN_DIR_VARIABLE, RankStatusFile, folder_of
from ..process.reaper import end_with_parent, fork_rank, survive_hydra
from ..process.run_directory import make_run_dir
from ..process.standard_streams import may_read, use_null
from ..version import __version__
from .output import RankOutput
from .reaper import ProgramRank, ProgramReaper, adopt_orphans
from .world import World, meet, own_entry

_STARTUP = Path(__file__).with_name("startup")
_STOP_S = 60.0  # maximum time before the time limit at which the program is asked to stop
_COLUMNS = ("rank", "host", "cores", "NUMA", "GPUs")
_ROLE = "default"  # torchrun's default name of the ranks' role
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def run_program(request: ProgramRequest) -> NoReturn:
    """Execute a program as this rank, and exit with its status. Collective over all ranks.

    This process becomes the reaper, and its child the program.

    Raises:
        UserError: The program cannot be started.
    """
    launcher_env.leave_outer_run(os.environ)
    environ, rank = os.environ, launched_rank(os.environ)
    size = launched_size(environ)
    run_dir = _run_dir(request, size)
    if RUN_DIR_VARIABLE not in environ:
        os.environ[RUN_DIR_VARIABLE] = str(run_dir)  # marks the processes of the run
    attempt = attempt_id(environ)
    if size > 1 and not attempt:
        raise LaunchError(
            "this launcher does not pass an identifier of the launch to its ranks; start them with mpitrain run"
        )
    folder = folder_of(run_dir) / f"{MEETING}{attempt.replace('/', '-')}"
    entry = own_entry(environ, _error(request))
    world = meet(folder, rank, size, entry, environ, lambda world: _prepare(run_dir, request, world))
    if rank == 0:
        for note in _notes(world):
            print(f"mpitrain: {note}", file=sys.stderr, flush=True)
    own = ProgramRank(rank, world, folder, run_dir, request, survive_hydra())
    _start(own, environment_of(world, rank, run_dir, environ))


def _run_dir(request: ProgramRequest, size: int) -> Path:
    """Return the absolute run directory, which exists.

    Raises:
        LaunchError: The directory is not known on all ranks, or cannot be written.
    """
    run_dir_of_launcher = os.environ.get(RUN_DIR_VARIABLE)
    run_dir = Path(run_dir_of_launcher) if run_dir_of_launcher else request.run_dir
    if run_dir is None and size > 1:
        raise LaunchError("mpitrain exec on several ranks needs a run directory: pass --run-dir, or use mpitrain run")
    return make_run_dir(request.name, run_dir)[0].absolute()


def _error(request: ProgramRequest) -> str:
    """Return why this host cannot start the program; empty if it can."""
    program = request.argv[0]
    return "" if shutil.which(program) is not None else f"the command {program} is not on PATH, or not executable"


def _stop_time(options: ProgramOptions) -> float | None:
    """Return when to request that the program stops, in seconds since the epoch; None for never."""
    now = time.time()
    end = end_of_time(options.time_limit, now=now)
    if end is None:
        return None
    return end - (min(_STOP_S, 0.05 * (end - now)) if options.stop_secs is None else options.stop_secs)


def _prepare(run_dir: Path, request: ProgramRequest, world: World) -> float | None:
    """Record the program, its options, and the ranks; return the time of the request to stop."""
    tables = {
        "run": {"mode": PROGRAM, **plain(vars(request.options))},
        "job": {},
        "versions": {
            "job_file": request.name,
            "command": shlex.join(request.argv),
            "mpitrain": __version__,
            "python": sys.version.split()[0],
        },
    }
    try:
        RunRecord(run_dir, tables, request.source, _table(world)).write(0)
        heartbeat.write(run_dir, heartbeat.new_status(run_dir, counted(len(world.entries), "rank")))
    except OSError as error:
        raise LaunchError(f"the run directory {run_dir} cannot be written: {error.strerror}") from error
    return _stop_time(request.options)


def _table(world: World) -> str:
    rows = [
        (str(rank), entry.host, *entry.binding.columns(), entry.devices or "-")
        for rank, entry in enumerate(world.entries)
    ]
    return format_table(_COLUMNS, rows)


def _notes(world: World) -> list[str]:
    """Return notes to the user about the ranks."""
    hosts = [entry.host for entry in world.entries]
    notes = crowd_warnings(hosts, [entry.binding for entry in world.entries])
    if SHOW_BINDING in os.environ:
        notes.append(f"the ranks\n{_table(world)}")
    for host in world.hosts:
        ranks = world.ranks_on(host)
        devices = {world.entries[rank].devices for rank in ranks}
        if len(devices) > 1:
            notes.append(
                f"each rank on {host} sees its own GPUs only (rank {ranks[0]}: CUDA_VISIBLE_DEVICES="
                f"{world.entries[ranks[0]].devices}): the program must use device 0, not LOCAL_RANK"
            )
            break
    return notes


def _start(own: ProgramRank, variables: Mapping[str, str]) -> NoReturn:
    """Start the program in a child with additional environment variables, and watch it."""
    options, argv = own.request.options, own.request.argv
    end_with_parent(signal.SIGTERM)  # a killed launcher does not end its ranks; the reaper then does
    adopt_orphans()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    page, stacks = ActivityPage("program"), os.memfd_create("stacks")
    activity.write_to(page)
    activity.set_limits(options.hang_timeout, options.long_timeout)
    activity.describe(role="", run_dir=str(own.run_dir))
    prefix, log = f"rank {own.rank}: " if own.rank else "", path_for(own.run_dir, own.rank)
    output = RankOutput(prefix, log, on_terminal=terminal_columns() > 0)
    environment = {
        **without_chosen(os.environ),
        **variables,
        activity.PAGE_VARIABLE: page.path,
        activity.STACKS_VARIABLE: f"/proc/{os.getpid()}/fd/{stacks}",
        "PYTHONPATH": os.pathsep.join([str(_STARTUP), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    if not may_read(0):
        use_null(0)
    child = fork_rank()
    if not child:
        environment[launcher_env.SET_FOR_PROGRAM] = ",".join(variables)
        launcher_env.mark_rank(environment)
        # Some launchers signal the process group, but only the reaper signals the program. In another session than the
        # terminal's, the program may read the terminal although it is not the group in the foreground.
        os.setsid()
        if options.signal != "USR1":
            # SIGUSR1 from srun is meant for the reaper, which sends this process the signal of --signal.
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        output.redirect()
        _execute(argv, environment)
    output.start(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')}: {shlex.join(argv)}")
    ProgramReaper(own, child, page, stacks, output).run()
    raise AssertionError


def _execute(argv: tuple[str, ...], environment: Mapping[str, str]) -> NoReturn:
    """Replace this process by the program."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        os.execvpe(argv[0], argv, environment)
    except OSError as error:
        hint = "; its first line must name an interpreter, as in #!/bin/bash" if error.errno == errno.ENOEXEC else ""
        os.write(2, f"{argv[0]} cannot be executed: {error.strerror}{hint}\n".encode("utf-8", "surrogateescape"))
    os._exit(126)


def exec_program(request: ProgramRequest) -> NoReturn:
    """Execute a program as this rank; print a user error, on rank 0 alone if all ranks have it."""
    try:
        run_program(request)
    except UserError as error:
        run_dir_of_launcher = os.environ.get(RUN_DIR_VARIABLE)
        RankStatusFile(
            Path(run_dir_of_launcher) if run_dir_of_launcher else None, launched_rank(os.environ)
        ).set_failed(error, is_user_error=True)
        if launched_rank(os.environ) == 0 or not error.on_all_ranks:
            print(f"mpitrain: {error}", file=sys.stderr, flush=True)
        else:
            time.sleep(1)  # a launcher ends all ranks when one exits; leave time for rank 0 to print
        sys.exit(error.exit_status)


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
        "MPITRAIN_FIRST_WORLD_SIZE": environ.get(launcher_env.FIRST_RANKS, size),
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
