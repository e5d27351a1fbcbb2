"""``mpitrain run``: start the ranks, report how they ended, and restart them if requested."""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..batch_systems.registry import array_index, remote_agent
from ..core import openblas
from ..core.checkpoint_files import remove_unfinished
from ..core.cpus import SHOW_BINDING
from ..core.words import counted
from ..errors import ConfigError, LaunchError, UserError
from ..monitor import heartbeat as status
from ..monitor.console import COLUMNS_VARIABLE, terminal_columns
from ..monitor.run_record import recorded_kernels, recorded_virtual_workers
from ..plan.request import JobRequest, LaunchRequest, Workload
from ..process import fork_server, host_check, host_watcher, launcher_env, rank_status, state_folder
from ..process.pid import is_alive, seconds_alive
from ..process.run_directory import (
    Failure,
    forget_launcher,
    forget_stop,
    make_run_dir,
    record_failure,
    record_launcher,
    remove_empty,
)
from ..process.signals import STOPPED_EARLY
from ..process.stream_client import VARIABLE as STREAMS
from . import bad_hosts
from .attempt import Attempt, AttemptResult
from .command_line import compose
from .first_server import FirstServer
from .hosts import Host, RemoteAgent, is_local
from .interrupts import Interrupts
from .mpi_launcher import Launcher, LaunchSpec, LocalMachine, chooses_output
from .outcome import Kind, Outcome, classify
from .preparation import make_launch_spec, prepare, resolve_allocation
from .restarts import Restarts
from .saved_states import SavedStates
from .scaling import ScaleRequest, answer_request, remove_request, remove_requests
from .spare_servers import SpareServers
from .staging import Staging, staging_command
from .standard_input import StandardInput
from .stream_server import StreamServer
from .terminal import say

_OTHER_RUN_S = 20.0  # time for ranks whose launcher was killed to save and exit


@dataclass
class Launch:
    """The launch to supervise."""

    request: LaunchRequest
    machine: LocalMachine
    launcher: Launcher
    spec: LaunchSpec
    server: FirstServer | None
    run_dir: Path = field(default_factory=Path)

    @property
    def keeps_state(self) -> bool:
        """Whether the ranks keep the newest state in memory for restarts."""
        options, workload = self.request.options, self.request.workload
        return bool(options.max_restarts) and options.recover != "checkpoint" and workload.keeps_checkpoints


def run(request: LaunchRequest, server: FirstServer | None = None) -> int:
    """Start the ranks of a run; return its exit status.

    Args:
        server: A server for the first ranks on this host; None if they start by themselves.

    Raises:
        LaunchError, ConfigError: The ranks cannot be started as requested.
    """
    launcher_env.leave_run(os.environ)
    machine, launcher, spec = prepare(request)
    if request.options.dry_run:
        if (folder := request.options.stage_env) is not None:
            print(staging_command(launcher, machine, spec, folder))
        print(compose(launcher, spec, machine, request.workload.words, request.workload.command))
        return 0
    if request.options.debug is not None:
        request = replace(request, workload=request.workload.with_options(hang_timeout=0.0))
    launch = Launch(request, machine, launcher, spec, server)
    with _run_dir(request.workload) as launch.run_dir:
        interrupts = Interrupts()
        with interrupts.recorded():
            user_input = StandardInput()
            supervisor = _Supervisor(launch, interrupts, user_input)
            try:
                return supervisor.run()
            finally:
                user_input.restore()
                supervisor.clean_up()


@contextlib.contextmanager
def _run_dir(workload: Workload) -> Iterator[Path]:
    """Yield the absolute run directory; remove it afterwards if it was created here and is still empty."""
    state_folder.remove_orphans()  # before this run makes its directory
    folder, made = make_run_dir(workload.name, workload.run_dir, workload.join, array_index(os.environ))
    _wait_for_other_run(folder)
    forget_stop(folder)
    if (age_s := rank_status.age_s(folder)) is not None:  # left by a run whose supervisor was killed
        host_watcher.end_ranks(str(folder.absolute()))
        host_watcher.remove_leftovers(str(folder.absolute()), age_s)
    try:
        try:
            record_launcher(folder)
        except OSError as error:
            raise LaunchError(f"the run directory {folder} cannot be written: {error.strerror}") from error
        yield folder.absolute()
    finally:
        forget_launcher(folder)
        forget_stop(folder)
        rank_status.clear(folder)
        with contextlib.suppress(OSError):
            remove_unfinished(folder / "checkpoints")
        remove_empty(made)


def _wait_for_other_run(folder: Path) -> None:
    """Wait until no rank of another run on this host writes to the run directory.

    Ranks whose launcher was killed still save, which takes time; a second chief would write to the same files.

    Raises:
        LaunchError: A rank of another run still runs after the timeout.
    """
    deadline = time.monotonic() + _OTHER_RUN_S
    while left := [e for e in rank_status.read(folder) if is_local(e.host) and is_alive(e.pid, e.start)]:
        if time.monotonic() > deadline:
            raise LaunchError(
                f"{folder} is in use by rank {left[0].rank} of another run, process {left[0].pid}; "
                "wait for it to end, or pass another --run-dir"
            )
        time.sleep(0.1)


class _Supervisor:
    """Runs attempts until training has ended or a restart cannot help."""

    def __init__(self, launch: Launch, interrupts: Interrupts, user_input: StandardInput) -> None:
        self._launch, self._interrupts, self._input = launch, interrupts, user_input
        self._input_rank = launch.request.options.debug
        if self._input_rank is None and launch.request.workload.command == "exec":
            self._input_rank = 0
        self._agent = RemoteAgent(_agent_program(launch))
        self._spec = launch.spec
        folder = launch.request.options.stage_env
        self._staging = None if folder is None else Staging(launch.launcher, launch.machine, folder, interrupts)
        recorded = recorded_virtual_workers(launch.run_dir) if launch.request.workload.resumes else None
        self._first_ranks = recorded or launch.spec.ranks
        self._is_scaled = False
        self._began, self._started_at = time.monotonic(), time.time() - seconds_alive(os.getpid())
        options, workload = launch.request.options, launch.request.workload
        self._restarts = Restarts(options.max_restarts, workload.keeps_checkpoints, workload.time_limit)
        self._continues = False  # whether the present attempt follows another one
        self._next_spec: LaunchSpec | None = None  # ranks of the next attempt; set while the present ranks stop for it
        self._kills = Counter[str]()  # attempts that ended because a signal killed a rank, by its host
        self._ranks_were_killed = False  # whether ranks of the last attempt may have been killed
        if not (launch.keeps_state and launch.request.workload.resumes):
            state_folder.remove(str(launch.run_dir))  # left by a run whose supervisor was killed
        # In an allocation, the server would belong to a job step, which may have other cores than the ranks.
        has_servers = workload.command == "train" and self._staging is None and not launch.machine.allocated
        names = [host.name for host in launch.spec.spares] if has_servers else []
        self._spare_servers = SpareServers(self._agent, names, launch.run_dir, launch.spec.env)
        self._saved = SavedStates(launch.run_dir, launch.request.workload.resumes, launch.keeps_state)

    def run(self) -> int:
        """Train; return the exit status."""
        run_dir = self._launch.run_dir
        while True:
            try:
                outcome = self._run_attempt()
            except LaunchError:  # the environment could not be copied
                if self._interrupts.received:
                    return self._interrupted()
                self._save_state()
                raise
            self._ranks_were_killed = outcome.kind not in (Kind.FINISHED, Kind.STOPPED)
            signals = len(self._interrupts.received)
            if (signals and outcome.has_failed) or (signals > 1 and outcome.kind is Kind.STOPPED):
                if signals == 1 and outcome.kind is Kind.FAILED and outcome.step is not None and outcome.reason:
                    say(outcome.reason)  # after the signal the rank failed for another reason, while it saved
                return self._interrupted()
            if outcome.reason:
                say(outcome.reason)
            if outcome.has_failed:
                if not self._prepare_restart(outcome):
                    self._save_state()
                    record_failure(run_dir, Failure(outcome.reason, outcome.rank, outcome.traceback))
                    return 1
                if self._interrupts.received:
                    return self._interrupted()
            elif outcome.kind is Kind.STOPPED and self._next_spec is not None and not self._interrupts.received:
                former, self._spec, self._next_spec, self._is_scaled = self._spec, self._next_spec, None, True
                self._leave({host.name for host in former.hosts or ()} - {host.name for host in self._spec.hosts or ()})
                remove_request(run_dir)
                self._restarts.forget_failures()
                say(f"continuing from {self._saved.describe()}, with {self._describe()}")
            elif outcome.kind is Kind.USER_ERROR:  # the attempt has changed nothing
                self._save_state()
                return UserError.exit_status
            else:
                record_failure(run_dir, None)
                return STOPPED_EARLY if outcome.kind is Kind.STOPPED else 0

    def clean_up(self) -> None:
        """Remove files and processes for restarts on this host; if ranks were killed, also on all other hosts."""
        run_dir = str(self._launch.run_dir)
        remove_requests(self._launch.run_dir)
        self._spare_servers.close()
        if not self._launch.request.options.max_restarts:
            return
        state_folder.remove(run_dir)
        fork_server.stop_server(run_dir)
        if self._ranks_were_killed:
            self._agent.run_on_each((host, self._removal) for host in self._remote_hosts())

    @property
    def _removal(self) -> str:
        """The command that removes what is kept for restarts on a host."""
        run_dir = str(self._launch.run_dir)
        scripts = (state_folder.__file__, "remove", run_dir), (fork_server.__file__, "stop", run_dir)
        return "; ".join(shlex.join([sys.executable, *words]) for words in scripts)

    def _leave(self, hosts: Iterable[str]) -> None:
        """Remove what is kept for restarts on hosts that are not used any more, in the background: they may be dead."""
        for host in hosts:
            if self._launch.request.options.max_restarts and not is_local(host):
                threading.Thread(target=self._agent.run, args=(host, self._removal), daemon=True).start()

    def _run_attempt(self) -> Outcome:
        """Run one attempt; retry once if the launcher itself failed to start."""
        result, outcome = self._start_ranks()
        if outcome.is_transient and not self._interrupts.received:
            say("the launcher failed to start; trying once more")
            result, outcome = self._start_ranks()
        if outcome.has_failed and self._spec.hosts is not None and not self._interrupts.received:
            self._kills.update(filter(None, [outcome.killed_on]))
            lost_hosts = outcome.lost_hosts or list(self._unreachable(self._spec.hosts, self._failed_twice(outcome)))
            outcome = replace(outcome, lost_hosts=lost_hosts)
        if outcome.kind is Kind.LAUNCH_FAILED and not outcome.lost_hosts and result.filtered_output.strip():
            print(result.filtered_output.strip(), file=sys.stderr)  # no other explanation is available
        return outcome

    def _start_ranks(self) -> tuple[AttemptResult, Outcome]:
        """Start the ranks, wait until they have ended, and return the outcome."""
        run_dir, earlier = self._launch.run_dir, status.read(self._launch.run_dir)
        result = self._prepare_attempt().run()
        self._continues = True
        launcher = f"{Path(self._launch.launcher.program).name}, process {result.pid}"
        ranks = self._spec.ranks or len(result.statuses)
        outcome = classify(result, ranks, launcher, _is_recorded_as_stopped(run_dir, earlier))
        if outcome.kind is Kind.USER_ERROR or self._interrupts.received:
            for host, error in result.unreachable.items():
                say(f"host {host} does not answer ({error}); check it for leftover processes")
        return result, outcome

    def _failed_twice(self, outcome: Outcome) -> list[str]:
        """Return the host of this failure if it is the second one there, none was elsewhere, and others suffice."""
        least, slots = self._launch.request.options.min_ranks, [host.slots for host in self._spec.hosts or ()]
        suffice = self._spec.spares or (least is not None and sum(slots) - max(slots, default=0) >= least)
        return [outcome.killed_on] if suffice and bad_hosts.failed_twice(outcome.killed_on, self._kills) else []

    def _unreachable(self, hosts: Sequence[Host], failed: Sequence[str] = ()) -> dict[str, str]:
        """Report and return the hosts that do not answer, with the error of each.

        If the run can do without them, hosts are also checked, and recorded as bad.

        Args:
            failed: The names, as ``hostname`` prints them, of hosts that should not be used.
        """
        if not self._can_do_without_hosts:
            errors, what = self._agent.unreachable(hosts), "does not answer"
        else:
            check = shlex.join([sys.executable, host_check.__file__, str(time.time()), *failed])
            errors, what = self._agent.unreachable(hosts, check), "cannot be used"
            bad_hosts.record(self._launch.run_dir, errors)
        for host, error in errors.items():
            say(f"host {host} {what}: {error}")
        return errors

    @property
    def _can_do_without_hosts(self) -> bool:
        return self._launch.request.options.min_ranks is not None or bool(self._launch.spec.spares)

    def _prepare_attempt(self) -> Attempt:
        launch, spec, is_restart = self._launch, self._spec, self._restarts.count > 0
        if self._staging is not None:
            spec = self._staging.from_copies(spec, is_restart)
        ours = {
            rank_status.RUN_DIR_VARIABLE: str(launch.run_dir),
            launcher_env.ATTEMPT: secrets.token_hex(8),
            launcher_env.STARTED_AT: str(self._started_at),
            launcher_env.RESTART_COUNT: str(self._restarts.count),
            launcher_env.MAX_RESTARTS: str(self._restarts.max_restarts),
        }
        if (interruption := self._restarts.interruption) is not None:
            ours[launcher_env.FAILED_AT] = str(interruption.time)
            ours[launcher_env.RESTARTS_SINCE] = str(interruption.restarts)
            if interruption.step is not None:
                ours[launcher_env.FAILED_STEP] = str(interruption.step)
        if self._first_ranks is not None and (self._is_scaled or launch.request.options.min_ranks is not None):
            ours[launcher_env.FIRST_RANKS] = str(self._first_ranks)
        if spec.spares and spec.hosts:
            ours[launcher_env.IDLE_SHARE] = str(len(spec.spares) / (len(spec.hosts) + len(spec.spares)))
        if launch.keeps_state:
            ours[launcher_env.KEEPS_STATE] = "1"
        resumes = self._continues or launch.request.workload.resumes
        if resumes and (kernels := recorded_kernels(launch.run_dir)):
            ours[openblas.KERNELS] = kernels
        if spec.network is not None:
            ours[launcher_env.NETWORK] = spec.network
        if launch.request.options.show_binding:
            ours[SHOW_BINDING] = "1"
        if columns := terminal_columns():
            ours[COLUMNS_VARIABLE] = str(columns)
        workload = self._workload()
        is_remote = bool(self._remote_hosts()) or launch.machine.allocated
        streams = StreamServer(self._input, self._input_rank, is_remote, spec.network)
        if not chooses_output(spec):
            ours[STREAMS] = streams.description
        if launch.server is not None:
            ours |= launch.server.variables(spec, launch.machine)
        spec_of_attempt = replace(spec, env={**spec.env, **ours})
        words = workload.words if self._staging is None else map(self._staging.in_copy, workload.words)
        forks = fork_server.FIRST in ours or (is_restart and workload.command == "train")
        command = compose(
            launch.launcher, spec_of_attempt, launch.machine, [*words], workload.command, is_restart, forks
        )
        stopping = "saving a checkpoint, then exiting" if workload.keeps_checkpoints else "asking the program to stop"
        return Attempt(
            command=command,
            ranks=spec.ranks,
            remote_hosts=self._remote_hosts(),
            run_dir=launch.run_dir,
            agent=self._agent,
            interrupts=self._interrupts,
            link_timeout_s=launch.request.options.link_timeout,
            stopping=stopping,
            accepts=self._accepts,
            streams=streams,
        )

    def _remote_hosts(self) -> list[str]:
        return [host.name for host in self._spec.hosts or () if not is_local(host.name)]

    def _workload(self) -> Workload:
        """Return the work of the ranks; a restart resumes from the run's newest checkpoint, in the remaining time."""
        workload = self._launch.request.workload
        if not self._continues:
            return workload
        limit_s = workload.time_limit
        return workload.restarted(
            self._saved.newest_checkpoint(), None if limit_s is None else max(1.0, round(limit_s - self._elapsed_s()))
        )

    def _prepare_restart(self, outcome: Outcome) -> bool:
        """Prepare another attempt and wait for the restart delay; return False if there is no other attempt."""
        restarts, ranks = self._restarts, self._spec.ranks or 1
        why = restarts.reason_not_to_restart(outcome, ranks, self._elapsed_s())
        self._input.poll()
        if not why and self._input_rank is not None and self._input.was_read:
            why = "the ranks have read standard input, which cannot be read again"
        if not why and outcome.lost_hosts:
            why = self._exclude_hosts(outcome.lost_hosts)
        if why:
            if restarts.max_restarts:
                say(f"not restarting: {why}")
            return False
        seconds = restarts.add(outcome, ranks)
        where = f" from {self._saved.describe()}" if self._launch.request.workload.keeps_checkpoints else ""
        number = f"restart {restarts.count} of {restarts.max_restarts}"
        when = f" in {seconds:.0f} s" if seconds else ""
        say(f"restarting{when}{where}, with {self._describe()} ({number})")
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self._interrupts.received:
            time.sleep(0.05)
        return True

    def _accepts(self, request: ScaleRequest) -> bool:
        """Answer a request to scale the run; return whether the ranks must stop for the request."""
        error = self._scale(request)
        answer_request(self._launch.run_dir, request, error)
        return not error

    def _scale(self, request: ScaleRequest) -> str:
        """Prepare to continue as requested; return why that is impossible, or an empty string."""
        launch, workload = self._launch, self._launch.request.workload
        options = replace(launch.request.options, ranks=request.ranks)
        if request.hosts is not None:
            options = replace(options, hosts=request.hosts, hostfile=None)
        try:
            if not workload.keeps_checkpoints:
                return "the program does not save mpitrain's checkpoints"
            spec = make_launch_spec(options, launch.launcher, launch.machine, bad_hosts.of(options, launch.run_dir))
            launch.machine = resolve_allocation(launch.machine, launch.launcher, spec)
            if spec.ranks is not None:
                workload.check_ranks(spec.ranks)
                self._check_step(spec.ranks)
        except UserError as error:
            return str(error)
        unreachable = self._agent.unreachable(spec.hosts or ())
        self._next_spec = None if unreachable else spec
        return "; ".join(f"host {host} does not answer: {error}" for host, error in unreachable.items())

    def _check_step(self, ranks: int) -> None:
        """Check that ``ranks`` can compute the steps of the run as its first ranks did.

        Raises:
            ConfigError: They are more than these.
        """
        workload, recorded = self._launch.request.workload, recorded_virtual_workers(self._launch.run_dir)
        first = self._first_ranks if recorded is None else recorded
        keeps_step = isinstance(workload, JobRequest) and (workload.keeps_step or bool(recorded))
        if keeps_step and first and ranks > first:
            raise ConfigError(
                f"a step of the run has {counted(first, 'virtual worker')}, so that at most {first} ranks can compute "
                "it; a run that may grow needs more --virtual-workers, or --virtual-workers 0, at its start"
            )

    def _exclude_hosts(self, lost_hosts: Sequence[str]) -> str:
        """Replace lost hosts by spare hosts, or remove them if ``--min-ranks`` allows it; return why not, or ""."""
        least = self._launch.request.options.min_ranks
        assert self._spec.hosts is not None
        if self._staging is not None:
            self._staging.forget(lost_hosts)
        silent = self._unreachable(self._spec.spares)
        if self._can_do_without_hosts:
            bad = bad_hosts.read(self._launch.run_dir)
            bad_hosts.record(self._launch.run_dir, dict.fromkeys(lost_hosts, "did not answer") | bad)
        self._leave(lost_hosts)
        self._replace_hosts(lost_hosts, [host for host in self._spec.spares if host.name not in silent])
        left = [host for host in self._spec.hosts if host.name not in lost_hosts]
        ranks = sum(host.slots for host in left)
        if len(left) == len(self._spec.hosts):
            return ""
        if least is None:
            say("waiting for the lost hosts; pass --min-ranks M to restart on the other hosts with at least M ranks")
            return ""
        if ranks < least:
            return f"the remaining hosts have {counted(ranks, 'slot')}, fewer than --min-ranks {least}"
        self._spec = replace(self._spec, hosts=left, ranks=ranks)
        return ""

    def _replace_hosts(self, lost_hosts: Sequence[str], spares: list[Host]) -> None:
        """Replace lost hosts by spare hosts, as far as there are any."""
        assert self._spec.hosts is not None
        hosts = list(self._spec.hosts)
        for index, host in enumerate(hosts):
            if host.name in lost_hosts and spares:
                hosts[index] = host._replace(name=spares.pop(0).name)
                say(f"host {hosts[index].name} replaces {host.name}; {counted(len(spares), 'spare host')} left")
        self._spec = replace(self._spec, hosts=hosts, spares=spares)

    def _interrupted(self) -> int:
        """Return the exit status of a run that a signal ended."""
        self._interrupts.end_echo()
        self._save_state()
        number = self._interrupts.received[-1]
        name = signal.Signals(number).name
        path = self._saved.newest_checkpoint()
        if path is not None and len(self._interrupts.received) == 1:
            folder = shlex.quote(os.path.relpath(self._launch.run_dir))
            say(f"ended by {name}; to resume from {path.name}, run the same command with --run-dir {folder}")
            return STOPPED_EARLY
        nothing_saved = path is None and self._launch.request.workload.keeps_checkpoints
        say(f"ended by {name}{'; nothing was saved' if nothing_saved else ''}")
        return 128 + number

    def _save_state(self) -> None:
        """Save the newest state in memory as a checkpoint at the end of a run, if it is newer than the checkpoints."""
        if message := self._saved.save_state():
            say(message)

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._began

    def _describe(self) -> str:
        ranks, hosts = self._spec.ranks, self._spec.hosts
        text = "the same ranks" if ranks is None else counted(ranks, "rank")
        return text if hosts is None else f"{text} on {', '.join(host.name for host in hosts)}"


def _agent_program(launch: Launch) -> str | None:
    """Return the program that runs commands on other hosts; None if it is ``ssh``."""
    options, environ = launch.request.options, launch.machine.environ
    names = ("PRTE_MCA_plm_ssh_agent", "OMPI_MCA_plm_rsh_agent", "HYDRA_LAUNCHER_EXEC", "I_MPI_HYDRA_BOOTSTRAP_EXEC")
    named = options.remote_agent or next((environ[name] for name in names if environ.get(name)), None)
    if named or options.hosts is not None or options.hostfile is not None:
        return named
    return remote_agent(environ)


def _is_recorded_as_stopped(run_dir: Path, earlier: status.Status | None) -> bool:
    """Return whether the run's heartbeat records that it was stopped before its last step.

    Args:
        earlier: The heartbeat before this attempt; an attempt that has nothing to train does not change it.
    """
    recorded = status.read(run_dir)
    is_new = recorded is not None and (earlier is None or recorded.started_at != earlier.started_at)
    return recorded is not None and is_new and recorded.state == "stopped"
