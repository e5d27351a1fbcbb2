"""Parse host lists, assign ranks to hosts, and check whether hosts answer."""

from __future__ import annotations

import shlex
import socket
import subprocess
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from ..core.words import counted
from ..errors import LaunchError

_ANSWER_S = 15.0


class Host(NamedTuple):
    """A host and its number of ranks (slots); 0 if the user gave no number."""

    name: str
    slots: int

    def __str__(self) -> str:
        return f"{self.name}:{self.slots}" if self.slots else self.name


def parse_hosts(text: str) -> list[Host]:
    """Parse the value of ``--hosts a:4,b:4``.

    Raises:
        LaunchError: The text names no host, or an entry is invalid.
    """
    return _merged([_parse(part, f"--hosts {text}") for part in text.split(",") if part.strip()], f"--hosts {text}")


def read_hostfile(path: Path) -> list[Host]:
    """Read a hostfile: one host per line, as ``a``, ``a:4`` or ``a slots=4``; ``#`` starts a comment.

    Raises:
        LaunchError: The file cannot be read, or a line is invalid.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a UTF-8 text file"
        raise LaunchError(f"--hostfile {path}: {reason}") from error
    hosts = []
    for number, line in enumerate(lines, 1):
        words = line.split("#")[0].split()
        if not words:
            continue
        slots = [word.removeprefix("slots=") for word in words[1:] if word.startswith("slots=")]
        hosts.append(_parse(":".join([words[0], *slots[:1]]), f"--hostfile {path}, line {number}"))
    return _merged(hosts, f"--hostfile {path}")


def _parse(text: str, where: str) -> Host:
    name, colon, slots = text.strip().rpartition(":")
    if not colon:
        name, slots = slots, "0"
    if not name or not slots.isdigit() or (colon and not int(slots)):
        raise LaunchError(f"{where}: {text.strip()!r} is invalid; give HOST or HOST:RANKS")
    if name.startswith("-") or any(mark.isspace() for mark in name):
        raise LaunchError(f"{where}: {name!r} is not a valid host name")
    return Host(name, int(slots))


def _merged(hosts: Sequence[Host], where: str) -> list[Host]:
    """Merge entries of the same host by adding their slots."""
    slots: dict[str, list[int]] = {}
    for host in hosts:
        slots.setdefault(host.name, []).append(host.slots)
    if not slots:
        raise LaunchError(f"{where} contains no host; give at least one HOST or HOST:RANKS")
    # Scheduler hostfiles repeat a host once per rank.
    return [Host(name, sum(n or (len(counts) > 1) for n in counts)) for name, counts in slots.items()]


def assign_ranks(hosts: Sequence[Host], ranks: int | None) -> list[Host]:
    """Assign ranks to hosts: fill hosts in order; hosts without a number share the rest evenly.

    Args:
        ranks: Total number of ranks; None to fill all slots, with one rank on hosts without a number.

    Raises:
        LaunchError: The hosts have too few slots.
    """
    unsized = [host for host in hosts if not host.slots]
    total = sum(host.slots for host in hosts)
    if ranks is None:
        return [Host(host.name, host.slots or 1) for host in hosts]
    if not unsized and ranks > total:
        names = ",".join(map(str, hosts))
        raise LaunchError(f"-n {ranks} exceeds the {counted(total, 'slot')} of {names}; lower -n or add hosts")
    share, more = divmod(max(0, ranks - total), len(unsized)) if unsized else (0, 0)
    room = {host.name: share + (index < more) for index, host in enumerate(unsized)}
    left, assigned = ranks, []
    for host in hosts:
        count = min(left, host.slots or room[host.name])
        left -= count
        if count:
            assigned.append(Host(host.name, count))
    return assigned


def is_local(name: str) -> bool:
    """Return whether a host name or address belongs to this machine."""
    if name in ("localhost", socket.gethostname()):
        return True
    try:
        address = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0]
        with socket.socket(address[0], socket.SOCK_STREAM) as probe:
            probe.bind((address[4][0], 0))
    except OSError:
        return False
    return True


class RemoteAgent:
    """Runs commands on other hosts, with ``ssh`` or the user's remote agent."""

    def __init__(self, program: str | None) -> None:
        self._words = shlex.split(program or "ssh")
        if Path(self._words[0]).name == "ssh":
            self._words += ["-o", "BatchMode=yes", "-o", "ConnectTimeout=8"]

    def start(self, host: str, command: str) -> subprocess.Popen[bytes] | None:
        """Start a shell command on a host; its standard input and output are pipes. None if the agent cannot be run."""
        pipe, null = subprocess.PIPE, subprocess.DEVNULL
        try:
            # In its own session, so that Ctrl-C in the terminal does not end the agent.
            return subprocess.Popen(
                [*self._words, host, command], stdin=pipe, stdout=pipe, stderr=null, start_new_session=True
            )
        except OSError:
            return None

    def run(self, host: str, command: str) -> str | None:
        """Run a shell command on a host; return None on success, else an error message."""
        try:
            done = subprocess.run(
                [*self._words, host, command],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_ANSWER_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"no answer in {_ANSWER_S:.0f} s"
        except OSError as error:
            return f"{self._words[0]} cannot be run: {error.strerror}"
        if not done.returncode:
            return None
        errors = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        return errors[-1] if errors else f"{self._words[0]} exited with status {done.returncode}"

    def run_on_each(self, commands: Iterable[tuple[str, str]]) -> dict[str, str]:
        """Run commands on several hosts concurrently; return the hosts that failed, with the error of each."""
        commands = list(commands)
        with ThreadPoolExecutor(max(1, min(64, len(commands)))) as threads:
            answers = list(threads.map(lambda one: self.run(*one), commands))
        return {host: error for (host, _), error in zip(commands, answers, strict=True) if error is not None}

    def unreachable(self, hosts: Iterable[Host]) -> dict[str, str]:
        """Return the hosts that do not answer, with the error of each."""
        return self.run_on_each((host.name, "true") for host in hosts if not is_local(host.name))
