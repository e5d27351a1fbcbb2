"""Parse host lists, assign ranks to hosts, and check whether hosts answer."""

from __future__ import annotations

import re
import shlex
import socket
import subprocess
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from ..core.words import counted, one_line
from ..errors import LaunchError

_ANSWER_S = 15.0
_MOST_HOSTS = 65_536  # of a list in brackets, as in Slurm's default


class Host(NamedTuple):
    """A host and its number of ranks (slots); 0 if the user gave no number."""

    name: str
    slots: int

    def __str__(self) -> str:
        return f"{self.name}:{self.slots}" if self.slots else self.name


def parse_hosts(text: str) -> list[Host]:
    """Parse the value of ``--hosts a:4,b:4``, or lines as of ``scontrol show hostnames``; see ``_parse``.

    Raises:
        LaunchError: The text names no host, or an entry is invalid.
    """
    where = f"--hosts {one_line(text)}"
    entries = re.split(r"[,\n](?![^\[\]]*\])", text)  # not at commas in brackets
    return _merged([host for entry in entries if entry.strip() for host in _parse(entry.strip(), where)], where)


def read_hostfile(path: Path) -> list[Host]:
    """Read a hostfile as Open MPI, MPICH and DeepSpeed do: one entry in each line; ``#`` starts a comment.

    An entry is ``a``, ``a:4`` or ``a slots=4``, where ``slots`` may be ``slot``, ``cpu`` or ``count``, in capitals, and
    with blanks around ``=``. ``max_slots`` or ``max-slots`` may follow. ``a`` may be several hosts, see ``_parse``.

    Raises:
        LaunchError: The file cannot be read, or a line is invalid.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a UTF-8 text file"
        raise LaunchError(f"--hostfile {path}: {reason}") from error
    hosts = []
    for number, line in enumerate(lines, 1):
        entry, *words = re.sub(r"\s*=\s*", "=", line.partition("#")[0]).split() or [""]
        if entry:
            where = f"--hostfile {path}, line {number}"
            slots = _slots(words, where)
            if slots and re.search(r":[0-9]+$", entry):
                raise LaunchError(f"{where}: {line.strip()!r} has two numbers of ranks; give one")
            hosts += _parse(f"{entry}:{slots}" if slots else entry, where)
    return _merged(hosts, f"--hostfile {path}")


def _slots(words: Sequence[str], where: str) -> str | None:
    """Return the number of slots in the words after a host; None if there is none."""
    values: dict[str, str] = {}
    for word in words:
        key, _, value = word.lower().partition("=")
        key = {"slot": "slots", "cpu": "slots", "count": "slots", "max-slots": "max_slots"}.get(key, key)
        if key not in ("slots", "max_slots") or not re.fullmatch(r"[0-9]{1,9}", value) or key in values:
            raise LaunchError(f"{where}: {word!r} is invalid; after the host, give slots=RANKS")
        values[key] = value
    slots, most = values.get("slots"), values.get("max_slots")
    if most is not None and (slots is None or int(slots) > int(most)):
        raise LaunchError(f"{where}: max_slots={most} needs slots=RANKS, at most {most}")
    return slots


def _parse(text: str, where: str) -> list[Host]:
    """Parse ``HOST`` or ``HOST:RANKS``, where the host may be a list as in Slurm: ``node[01,03-05]`` is four hosts."""
    found = re.fullmatch(r"((?:[A-Za-z0-9_.@-]|\[[0-9,-]+\])+)(?::([0-9]{1,9}))?", text)
    if found is None or text.startswith("-"):
        is_ipv6 = text.count(":") > 1 and re.fullmatch(r"\[?[0-9A-Fa-f:.]+(%\w+)?(\](:\d+)?)?", text)
        why = "; launchers accept no IPv6 addresses in lists of hosts, so give its name" if is_ipv6 else ""
        raise LaunchError(f"{where}: {text!r} is invalid; give HOST or HOST:RANKS, separated by commas{why}")
    name, slots = found[1], found[2]
    if slots is not None and not int(slots):
        raise LaunchError(f"{where}: {text!r} has no ranks; give HOST:RANKS with at least 1 rank, or leave it out")
    return [Host(each, int(slots or 0)) for each in _expand(name, where)]


def _expand(name: str, where: str) -> list[str]:
    """Return the hosts of a list such as ``r[1-2]n[01,03]``, in the order of ``scontrol show hostnames``."""
    before, bracket, rest = name.partition("[")
    if not bracket:
        return [name]
    inside, _, after = rest.partition("]")
    ends, numbers = _expand(after, where), list[str]()
    for part in inside.split(","):
        found = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", part)
        first, last = (int(found[1]), int(found[2] or found[1])) if found is not None else (1, 0)
        if found is None or last < first:
            raise LaunchError(f"{where}: [{inside}] is no list of numbers, such as [01,03-05]")
        if (len(numbers) + last - first + 1) * len(ends) > _MOST_HOSTS:
            raise LaunchError(f"{where}: {name} has more than {_MOST_HOSTS:,} hosts")
        numbers += [f"{number:0{len(found[1])}}" for number in range(first, last + 1)]
    return [before + number + end for number in numbers for end in ends]


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

    def unreachable(self, hosts: Iterable[Host], command: str = "true") -> dict[str, str]:
        """Return the other hosts that do not answer, or on which the command fails, with the error of each."""
        return self.run_on_each((host.name, command) for host in hosts if not is_local(host.name))
