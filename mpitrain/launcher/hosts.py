"""The hosts that a user names, how ranks are spread over them, and whether they answer."""

from __future__ import annotations

import fcntl
import ipaddress
import shlex
import socket
import subprocess
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from ..errors import LaunchError

_ANSWER_S = 15.0


class Host(NamedTuple):
    """A host, and how many ranks it takes; 0 where the user did not say."""

    name: str
    slots: int

    def __str__(self) -> str:
        return f"{self.name}:{self.slots}" if self.slots else self.name


def parse_hosts(text: str) -> list[Host]:
    """The hosts of ``--hosts a:4,b:4``.

    Raises:
        LaunchError: It names no host, or a number of ranks is none.
    """
    return _merged([_parse(part, f"--hosts {text}") for part in text.split(",") if part.strip()], f"--hosts {text}")


def read_hostfile(path: Path) -> list[Host]:
    """The hosts of a file: a line each, ``a``, ``a:4`` or ``a slots=4``; ``#`` begins a comment.

    Raises:
        LaunchError: It cannot be read, or a line is not understood.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise LaunchError(f"--hostfile {path}: {reason}") from error
    found = []
    for number, line in enumerate(lines, 1):
        words = line.split("#")[0].split()
        if not words:
            continue
        slots = [word.removeprefix("slots=") for word in words[1:] if word.startswith("slots=")]
        found.append(_parse(":".join([words[0], *slots[:1]]), f"--hostfile {path}, line {number}"))
    return _merged(found, f"--hostfile {path}")


def _parse(text: str, where: str) -> Host:
    name, colon, slots = text.strip().rpartition(":")
    if not colon:
        name, slots = slots, "0"
    if not name or not slots.isdigit() or (colon and not int(slots)):
        raise LaunchError(f"{where}: {text.strip()!r} is not HOST or HOST:RANKS")
    if name.startswith("-") or any(mark.isspace() for mark in name):
        raise LaunchError(f"{where}: {name!r} is no host's name")
    return Host(name, int(slots))


def _merged(hosts: Sequence[Host], where: str) -> list[Host]:
    """Each host once: one that is named twice takes as many ranks as both say."""
    slots: dict[str, list[int]] = {}
    for host in hosts:
        slots.setdefault(host.name, []).append(host.slots)
    if not slots:
        raise LaunchError(f"{where}: there is no host in it; give HOST:RANKS")
    # Schedulers' files name a host once for each rank that it takes.
    return [Host(name, sum(n or (len(told) > 1) for n in told)) for name, told in slots.items()]


def assign_ranks(hosts: Sequence[Host], ranks: int | None) -> list[Host]:
    """How many ranks each host gets: hosts are filled in their order, those without a number alike.

    Args:
        ranks: All together; None for as many as there is room for, one where a host's number is not given.

    Raises:
        LaunchError: There is no room for so many.
    """
    unsaid = [host for host in hosts if not host.slots]
    said = sum(host.slots for host in hosts)
    if ranks is None:
        return [Host(host.name, host.slots or 1) for host in hosts]
    if not unsaid and ranks > said:
        names = ",".join(map(str, hosts))
        raise LaunchError(
            f"-n {ranks} is more than {names} has room for, {said} rank{'s' * (said != 1)}: give a lower -n"
        )
    share, more = divmod(max(0, ranks - said), len(unsaid)) if unsaid else (0, 0)
    room = {host.name: share + (index < more) for index, host in enumerate(unsaid)}
    left, found = ranks, []
    for host in hosts:
        taken = min(left, host.slots or room[host.name])
        left -= taken
        if taken:
            found.append(Host(host.name, taken))
    return found


def is_here(name: str) -> bool:
    """Whether a name or address is this machine's own."""
    if name in ("localhost", socket.gethostname()):
        return True
    try:
        address = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0]
        with socket.socket(address[0], socket.SOCK_STREAM) as probe:
            probe.bind((address[4][0], 0))
    except OSError:
        return False
    return True


def network_of(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    """The network that a text such as ``10.1.0.0/16`` names; None for what may be an interface's name.

    Raises:
        LaunchError: It is neither.
    """
    if "/" not in text and "." not in text:
        return None
    try:
        return ipaddress.ip_network(text, strict=False)
    except ValueError as error:
        raise LaunchError(f"--network {text}: not a network such as 10.1.0.0/16, and no interface's name") from error


def interface_of(network: str) -> str:
    """The name of this host's interface in a network such as ``10.1.0.0/16``, or a name as it is given.

    Raises:
        LaunchError: This host has no address there.
    """
    names = [name for _, name in socket.if_nameindex()]
    if network in names:
        return network
    wanted = network_of(network)
    if wanted is None:
        raise LaunchError(f"--network {network}: neither a network such as 10.1.0.0/16 nor one of {', '.join(names)}")
    found = {name: address for name in names if (address := _address_of(name)) is not None}
    for name, address in found.items():
        if address in wanted:
            return name
    here = ", ".join(f"{name} {address}" for name, address in found.items())
    raise LaunchError(f"--network {network}: this host has no address there, but {here}")


def _address_of(interface: str) -> ipaddress.IPv4Address | None:
    siocgifaddr = 0x8915
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), siocgifaddr, interface.encode()[:15].ljust(256, b"\0"))
        except OSError:
            return None  # it has none
    return ipaddress.IPv4Address(answer[20:24])


class RemoteAgent:
    """Runs commands on other hosts, as the launcher does: ``ssh`` unless the user names another program."""

    def __init__(self, program: str | None) -> None:
        self._words = shlex.split(program or "ssh")
        if Path(self._words[0]).name == "ssh":
            self._words += ["-o", "BatchMode=yes", "-o", "ConnectTimeout=8"]

    def run(self, host: str, command: str) -> str | None:
        """Run a shell command on a host; None where it went well, else what was said."""
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
            return f"{self._words[0]} does not run: {error.strerror}"
        if not done.returncode:
            return None
        said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        return said[-1] if said else f"{self._words[0]} ended with status {done.returncode}"

    def run_on_each(self, commands: Iterable[tuple[str, str]]) -> dict[str, str]:
        """Run a command on each of several hosts at once; what those said where it went wrong."""
        commands = list(commands)
        with ThreadPoolExecutor(max(1, min(64, len(commands)))) as threads:
            answers = list(threads.map(lambda one: self.run(*one), commands))
        return {host: said for (host, _), said in zip(commands, answers, strict=True) if said is not None}

    def unreachable(self, hosts: Iterable[Host]) -> dict[str, str]:
        """The hosts that do not answer, and what was said instead."""
        return self.run_on_each((host.name, "true") for host in hosts if not is_here(host.name))
