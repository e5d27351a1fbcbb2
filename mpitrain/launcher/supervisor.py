"""``mpitrain run``: starts the ranks, tells what becomes of them, and starts them again where asked."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from .. import checkpoint
from ..errors import ConfigError, LaunchError
from ..monitor import heartbeat as status
from ..monitor.console import COLUMNS_VARIABLE, terminal_columns
from ..plan.config import RunConfig
from ..process import rank_status
from ..process.pid import is_alive
from ..process.run_directory import cannot_write, missing_folders, new_run_dir, remove_empty
from ..process.signals import STOPPED_EARLY
from .allocation import allocated_ranks
from .attempt import Attempt, Interrupts
from .command_line import LaunchSpec, LocalMachine, compose
from .hosts import Host, RemoteAgent, assign_ranks, interface_of, is_here, network_of, parse_hosts, read_hostfile
from .mpi_flavors import Launcher, find_launcher
from .restarts import Outcome, classify_exit, reason_to_give_up, restart_delay_s

# Open MPI's launcher cannot begin: it finds the session folder of one that had the same process number and was killed.
_PASSES = "listener thread failed to start"
_OTHERS_S = 20.0  # in which ranks whose launcher has been killed may save and end


@dataclass(frozen=True)
class Options:
    """The flags of ``mpitrain run`` itself."""

    ranks: int | None = None
    hosts: str | None = None
    hostfile: Path | None = None
    remote_agent: str | None = None
    network: str | None = None
    env: Sequence[str] = ()
    launcher_args: str = ""
    max_restarts: int = 0
    min_ranks: int | None = None
    dry_run: bool = False


@dataclass
class Launch:
    """What is started, and started again.

    Attributes:
        name: The job's name.
        arguments: Of ``mpitrain train``.
    """

    name: str
    config: RunConfig
    arguments: list[str]
    options: Options
    machine: LocalMachine
    launcher: Launcher
    spec: LaunchSpec
    run_dir: Path = field(default_factory=Path)


def run(options: Options, name: str, config: RunConfig, arguments: Sequence[str]) -> int:
    """Start the ranks of ``mpitrain train ARGUMENTS``; return the exit status of the training.

    Raises:
        LaunchError: The ranks cannot be started as asked.
    """
    machine = LocalMachine.here()
    launcher = find_launcher()
    spec = make_launch_spec(options, launcher, machine)
    if spec.ranks is not None:
        config.check_ranks(spec.ranks)
    check_restarts(options, spec, config)
    if options.dry_run:
        print(compose(launcher, spec, machine, arguments))
        return 0
    launch = Launch(name, config, list(arguments), options, machine, launcher, spec)
    with _run_dir(name, config.run_dir) as launch.run_dir:
        interrupts = Interrupts()
        with interrupts.recorded():
            return _Supervisor(launch, interrupts).run()


def make_launch_spec(options: Options, launcher: Launcher, machine: LocalMachine) -> LaunchSpec:
    """What to ask of the launcher.

    Raises:
        LaunchError: The flags contradict each other, or do not fit the launcher.
    """
    if options.hosts is not None and options.hostfile is not None:
        raise LaunchError("--hosts and --hostfile both say where ranks go: give one of them")
    named: list[Host] | None = None
    if options.hosts is not None:
        named = parse_hosts(options.hosts)
    elif options.hostfile is not None:
        named = read_hostfile(options.hostfile)
    hosts = None if named is None else assign_ranks(named, options.ranks)
    ranks = options.ranks if hosts is None else sum(host.slots for host in hosts)
    if ranks is None:
        ranks = allocated_ranks(machine.environ) or (None if machine.allocated else 1)
    agent, network = options.remote_agent, options.network
    if network is not None:
        network_of(network)
    if launcher.flavor != "openmpi":
        if agent is not None and len(shlex.split(agent)) != 1:
            raise LaunchError(f"--remote-agent {agent!r}: this MPI's launcher takes a program without arguments")
        network = None if network is None else interface_of(network)
    try:
        words = shlex.split(options.launcher_args)
    except ValueError as error:
        raise LaunchError(f"--launcher-args {options.launcher_args!r}: {error}") from error
    return LaunchSpec(ranks, hosts, agent, network, _environment(options.env, machine), words)


def _environment(given: Sequence[str], machine: LocalMachine) -> dict[str, str]:
    found = {}
    for setting in given:
        name, equals, value = setting.partition("=")
        if not name.isidentifier() or not name.isascii():
            raise LaunchError(f"--env {setting}: {name!r} is no variable's name; give NAME or NAME=VALUE")
        if not equals and name not in machine.environ:
            raise LaunchError(f"--env {name}: it is not set here; give --env {name}=VALUE")
        found[name] = value if equals else machine.environ[name]
    return found


def check_restarts(options: Options, spec: LaunchSpec, config: RunConfig) -> None:
    """Make sure that ``--min-ranks`` can be kept.

    Raises:
        ConfigError: It cannot, or says nothing.
    """
    if options.min_ranks is None:
        return
    if not options.max_restarts:
        raise ConfigError("--min-ranks goes with --max-restarts N: without it nothing is started again")
    if spec.hosts is None:
        raise ConfigError("--min-ranks goes with --hosts or --hostfile: there are no hosts to go on without")
    config.check_ranks(options.min_ranks)
    if spec.ranks is not None and options.min_ranks > spec.ranks:
        raise ConfigError(f"--min-ranks {options.min_ranks} is more than the {spec.ranks} ranks that are started")


@contextlib.contextmanager
def _run_dir(name: str, asked: Path | None) -> Iterator[Path]:
    """The run directory, absolute; one made here is removed again where nothing came to lie in it."""
    try:
        folder = asked or new_run_dir(name)
        made = missing_folders(folder)
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(13, "Permission denied")
    except OSError as error:
        raise cannot_write(asked or Path("runs"), error) from error
    _wait_for_others(folder)
    try:
        yield folder.absolute()
    finally:
        rank_status.clear(folder)
        remove_empty(made if asked is not None else [folder, folder.parent])


def _wait_for_others(folder: Path) -> None:
    """Return when no rank of another run is left here that writes to a run directory.

    Ranks whose launcher has been killed save, which takes them a while; a second chief would write among their files.

    Raises:
        LaunchError: One stays.
    """
    deadline = time.monotonic() + _OTHERS_S
    while left := [e for e in rank_status.read(folder) if is_here(e.host) and is_alive(e.pid, e.start)]:
        if time.monotonic() > deadline:
            raise LaunchError(
                f"rank {left[0].rank} of another run, process {left[0].pid}, is at work in {folder}: "
                "wait for its end, or give another --run-dir"
            )
        time.sleep(0.1)


class _Supervisor:
    """Attempt after attempt, until there is nothing left to do or to hope for."""

    def __init__(self, launch: Launch, interrupts: Interrupts) -> None:
        self._launch_options, self._interrupts = launch, interrupts
        self._agent = RemoteAgent(launch.options.remote_agent or _agent_in(launch.machine))
        self._spec = launch.spec
        self._began = time.monotonic()
        self._restarts = 0
        self._found = set(_stamps(launch.run_dir)) if launch.config.resume != "auto" else set()

    def run(self) -> int:
        """Train; the exit status."""
        before: Outcome | None = None
        while True:
            outcome = self._attempt()
            signals = len(self._interrupts.received)
            if (signals and outcome.kind in ("failed", "not begun")) or (signals > 1 and outcome.kind == "stopped"):
                if signals == 1 and outcome.kind == "failed" and outcome.step is not None:
                    _say(outcome.reason)  # it was to save, and something else came
                return self._interrupted()
            if outcome.kind in ("finished", "stopped", "mistake"):
                if outcome.reason:
                    _say(outcome.reason)
                return {"finished": 0, "stopped": STOPPED_EARLY}.get(outcome.kind, 2)
            _say(outcome.reason)
            if not self._again(outcome, before):
                return 1
            before = outcome
            if self._interrupts.received:
                return self._interrupted()

    def _attempt(self) -> Outcome:
        """One attempt; one more where the launcher itself could not begin."""
        for last in (False, True):
            attempt = self._prepare()
            attempt.run()
            ranks = self._spec.ranks or len(attempt.statuses)
            launcher = f"{Path(self._launch_options.launcher.program).name}, process {attempt.pid}"
            outcome = classify_exit(attempt.status, attempt.output, attempt.statuses, ranks, launcher)
            if outcome.kind == "finished" and _stopped_early(self._launch_options.run_dir):
                outcome = Outcome("stopped")  # the launcher's daemons were ended too, and it ends with 0 then
            for host, said in attempt.unreachable.items():
                if outcome.kind == "mistake" or self._interrupts.received:
                    _say(f"host {host} does not answer ({said}): look there for processes that are left")
            passes = _PASSES in attempt.output or attempt.status < 0
            if outcome.kind != "not begun" or last or not passes or self._interrupts.received:
                break
            _say("the launcher could not begin; trying once more")
        if outcome.kind in ("failed", "not begun") and self._spec.hosts is not None and not self._interrupts.received:
            silent = self._agent.unreachable(self._spec.hosts)
            for host, said in silent.items():
                _say(f"host {host} does not answer: {said}")
            outcome = replace(outcome, gone=list(silent))
        if outcome.kind == "not begun" and not outcome.gone and attempt.filtered_output.strip():
            print(attempt.filtered_output.strip(), file=sys.stderr)  # nobody else tells why
        return outcome

    def _prepare(self) -> Attempt:
        launch, spec = self._launch_options, self._spec
        ours = {rank_status.RUN_DIR_VARIABLE: str(launch.run_dir)}
        if columns := terminal_columns():
            ours[COLUMNS_VARIABLE] = str(columns)
        command = compose(launch.launcher, replace(spec, env={**spec.env, **ours}), launch.machine, self._arguments())
        hosts = [host.name for host in spec.hosts or ()]
        return Attempt(command, spec.ranks, hosts, launch.run_dir, self._agent, self._interrupts)

    def _arguments(self) -> list[str]:
        """Those of the user; a restart goes on from the run's own checkpoints, in the time that is left."""
        words, config = list(self._launch_options.arguments), self._launch_options.config
        if not self._restarts:
            return words
        newest = self._newest()
        if config.resume != "auto" and newest is not None:
            words += ["--resume", str(newest)]
        if config.time_limit is not None:
            words += ["--time-limit", f"{max(1.0, config.time_limit - self._took()):.0f}"]
        return words

    def _again(self, outcome: Outcome, before: Outcome | None) -> bool:
        """Prepare another attempt, and wait for its time; False where there is to be none."""
        options, limit = self._launch_options.options, self._launch_options.config.time_limit
        if self._restarts >= options.max_restarts:
            if options.max_restarts:
                _say(f"it is not started again: --max-restarts {options.max_restarts} are used up")
            return False
        why = reason_to_give_up(outcome, before, self._spec.ranks or 1)
        if not why and limit is not None and self._took() + 1 > limit:
            why = f"--time-limit {limit:g} is over"
        if not why and outcome.gone:
            why = self._leave_out(outcome.gone)
        if why:
            _say(f"it is not started again: {why}")
            return False
        self._restarts += 1
        seconds = restart_delay_s(self._restarts)
        path = self._newest()
        where = f"from {path.name}" if path is not None else "from the beginning"
        number = f"restart {self._restarts} of {options.max_restarts}"
        _say(f"starting again in {seconds:.0f} s {where}, {self._describe()} ({number})")
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self._interrupts.received:
            time.sleep(0.05)
        return True

    def _leave_out(self, gone: list[str]) -> str:
        """Go on without hosts that are gone, where the user allows it; why that cannot be, or nothing."""
        least = self._launch_options.options.min_ranks
        assert self._spec.hosts is not None
        left = [host for host in self._spec.hosts if host.name not in gone]
        ranks = sum(host.slots for host in left)
        if least is None:
            _say("waiting for it: --min-ranks M would allow to go on with M ranks or more on the other hosts")
            return ""
        if ranks < least:
            return f"the hosts that are left have {ranks} rank{'s' * (ranks != 1)}, and --min-ranks is {least}"
        self._spec = replace(self._spec, hosts=left, ranks=ranks)
        return ""

    def _interrupted(self) -> int:
        """The exit status of a run that a signal has ended, at once or before it could save."""
        if sys.stderr.isatty():
            print(file=sys.stderr)  # after ^C
        number = self._interrupts.received[-1]
        name = signal.Signals(number).name
        path = self._newest()
        if path is not None and len(self._interrupts.received) == 1:
            folder = shlex.quote(os.path.relpath(self._launch_options.run_dir))
            _say(f"ended by {name}: the same command with --run-dir {folder} goes on from {path.name}")
            return STOPPED_EARLY
        _say(f"ended by {name}" + ("" if path is not None else ", with nothing saved"))
        return 128 + number

    def _newest(self) -> Path | None:
        """The newest checkpoint to go on from: of this run alone, where it does not go on from an older one's."""
        own = [stamp for stamp in _stamps(self._launch_options.run_dir) if stamp not in self._found]
        return own[0][0] if own else None

    def _took(self) -> float:
        return time.monotonic() - self._began

    def _describe(self) -> str:
        ranks, hosts = self._spec.ranks, self._spec.hosts
        text = "the same ranks" if ranks is None else f"{ranks} rank{'s' * (ranks != 1)}"
        return text if hosts is None else f"{text} on {', '.join(host.name for host in hosts)}"


def _stamps(run_dir: Path) -> list[tuple[Path, int]]:
    """The checkpoints of a run directory, and when each was written, the highest step first."""
    found = []
    for path in checkpoint.steps(run_dir / "checkpoints").values():
        with contextlib.suppress(OSError):  # it is being removed
            found.append((path, path.stat().st_mtime_ns))
    return found


def _agent_in(machine: LocalMachine) -> str | None:
    """The remote agent that the user's environment names for the launcher."""
    names = ("PRTE_MCA_plm_ssh_agent", "OMPI_MCA_plm_rsh_agent", "HYDRA_LAUNCHER_EXEC", "I_MPI_HYDRA_BOOTSTRAP_EXEC")
    return next((machine.environ[name] for name in names if machine.environ.get(name)), None)


def _say(line: str) -> None:
    with contextlib.suppress(OSError):  # the terminal is gone
        print(f"mpitrain: {line}", file=sys.stderr, flush=True)


def _stopped_early(run_dir: Path) -> bool:
    """Whether the run says itself that it was stopped before its last step."""
    found = status.read(run_dir)
    return found is not None and found.state == "stopped"
