"""The record of a run: its options, job file and versions, all earlier ones, and what has changed since.

``config.toml`` holds the options of the last start. ``history`` has a directory for each start that differs from the
previous start. The directory contains ``config.toml`` and the job file. If the job file is in a git checkout, it also
contains the commit and the difference to this commit.
"""

from __future__ import annotations

import itertools
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import tomli_w

from ..core.files import replace_file
from ..core.toml import loads, read_toml
from ..errors import DataError, RecordError
from ..plan.config import GROUPS
from ..plan.option import flag, names_of

PROGRAM = "program"  # the recorded mode if the ranks execute a program
HISTORY, CONFIG = "history", "config.toml"
_JOB_PATH = "job_path"  # key in the table of versions
KERNELS = "blas_openblas"  # key in the table of versions; its value is OpenBLAS's version and the name of its kernels
PLACE = names_of(GROUPS, lambda info: info.is_place)
_GIT_S = 10.0  # time limit of one git command


class RunRecord:
    """The record that one start of a run writes; chief only.

    Args:
        folder: The run directory.
        tables: The content of ``config.toml``: ``run`` and ``job`` have the options, ``versions`` the software,
            ``data`` the identity of the data.
        job_file: The path of the job file.
        ranks: A table of the ranks.

    Attributes:
        tables: As given, with the absolute path of the job file; stored with every checkpoint.
    """

    def __init__(self, folder: Path, tables: Mapping[str, Mapping[str, Any]], job_file: Path, ranks: str) -> None:
        self._folder, self._job_file, self._ranks = folder, job_file, ranks
        versions = {**tables["versions"], _JOB_PATH: str(job_file.absolute())}
        text = tomli_w.dumps({**tables, "versions": versions})
        self.tables = loads(text.encode("utf-8", "replace").decode())  # a path may have any bytes

    def changes(self) -> list[str]:
        """Return the differences to the last start: options (``--batch-size: 100 -> 50``), OpenBLAS's kernels."""
        before, now = _compared(_read(self._folder / CONFIG)), _compared(self.tables)
        changed: list[str] = []
        if PROGRAM in (before.get("run", {}).get("mode"), now["run"].get("mode")):
            return changed  # the options of a job cannot be compared with those of a program
        for table in ("run", "job") if before else ():
            old, new = before.get(table, {}), now[table]
            names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
            changed += [
                f"{flag(name)}: {old.get(name, 'none')} -> {new.get(name, 'none')}"
                + (", so results may differ" if name == "threads" and new.get("virtual_workers") else "")
                for name in names
            ]
        old_kernels, new_kernels = _kernels(before), _kernels(now)
        if old_kernels and old_kernels != new_kernels:
            changed.append(f"kernels of OpenBLAS: {old_kernels} -> {new_kernels or 'none'}, so results may differ")
        return changed

    def check_data(self, run_dir: Path) -> None:
        """Check that the data is that with which a run was last started.

        Raises:
            DataError: A split has other examples.
        """
        before = _read(run_dir / CONFIG).get("data", {})
        for name, now in self.tables.get("data", {}).items():
            if before.get(name, now) != now:
                raise DataError(
                    f"the {name} data is not that with which the run in {run_dir} began: it was {before[name]}, "
                    f"and is {now}; restore the data, or begin a new run with --init-from {run_dir}"
                )

    def write(self, step: int) -> None:
        """Write ``ranks.txt``, ``config.toml``, and an entry of the history if anything has changed.

        Args:
            step: The step at which this start continues.

        Raises:
            OSError: The run directory cannot be written.
        """
        config = tomli_w.dumps(self.tables).encode()
        history = self._folder / HISTORY
        entries = sorted(history.glob("[0-9]*"))
        if not entries and (self._folder / CONFIG).exists():  # written by an older version
            entries = [_add(history, 1, 0, {CONFIG: (self._folder / CONFIG).read_bytes()})]
        source = {self._job_file.name: self._job_file.read_bytes()} if self._job_file.is_file() else {}
        files = {**source, **_git_state(self._job_file.parent)}
        if not entries or self._differs(entries[-1], files):
            _add(history, len(entries) + 1, step, {**files, CONFIG: config})
        replace_file(self._folder / CONFIG, config)
        (self._folder / "ranks.txt").write_text(self._ranks + "\n", encoding="utf-8")

    def _differs(self, entry: Path, files: Mapping[str, bytes]) -> bool:
        """Return whether this start differs from an entry of the history."""
        if _compared(_read(entry / CONFIG)) != _compared(self.tables):
            return True
        return {path.name: path.read_bytes() for path in entry.iterdir() if path.name != CONFIG} != files


class RecordedJob(NamedTuple):
    """The options and versions with which a run trained.

    Attributes:
        path: The job file that the run read, or the copy in the run's record if that file has changed.
        folder: The directory from which the run read the job file.
        tables: The tables of ``config.toml``.
    """

    path: Path
    folder: Path
    tables: dict[str, Any]


def recorded_job(run_dir: Path, step: int) -> RecordedJob:
    """Return the record with which a run trained when it wrote the checkpoint of ``step``.

    Raises:
        RecordError: The directory has no such record.
    """
    entries = [(int(path.name.rpartition("-")[2]), path) for path in sorted((run_dir / HISTORY).glob("[0-9]*-step-*"))]
    if not entries:
        raise RecordError(f"{run_dir} has no record of its job in {HISTORY}: pass the model")
    entry = next((path for start, path in reversed(entries) if start < step), entries[0][1])
    tables = _read(entry / CONFIG)
    copies = sorted(entry.glob("*.py"))
    if not copies or not tables:
        raise RecordError(f"{entry} is incomplete: it must have {CONFIG} and the job file; pass the model")
    original = Path(tables.get("versions", {}).get(_JOB_PATH, copies[0]))
    unchanged = original.is_file() and original.read_bytes() == copies[0].read_bytes()
    return RecordedJob(original if unchanged else copies[0], original.parent, tables)


def recorded_kernels(run_dir: Path) -> str:
    """Return the name of the OpenBLAS kernels of a run's last start; empty if its record names none."""
    return _kernels(_read(run_dir / CONFIG))


def recorded_virtual_workers(run_dir: Path) -> int | None:
    """Return the number of virtual workers of a run's last start; 0 if it cannot have any, None if it had none."""
    workers = _read(run_dir / CONFIG).get("run", {}).get("virtual_workers")
    return workers if isinstance(workers, int) else None


def _kernels(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the name of OpenBLAS's kernels."""
    return str(tables.get("versions", {}).get(KERNELS, "")).partition(" ")[2]


def _read(path: Path) -> dict[str, Any]:
    """Return the tables of ``config.toml``; none if there is no valid file."""
    try:
        return read_toml(path)
    except (OSError, ValueError):
        return {}


def _compared(tables: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the tables without options that do not change how a run trains."""
    return {
        name: {option: value for option, value in table.items() if option not in (*PLACE, _JOB_PATH)}
        for name, table in tables.items()
    }


def _add(history: Path, first: int, step: int, files: Mapping[str, bytes]) -> Path:
    """Add an entry to the history; it appears complete or not at all."""
    partial = history / ".partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for name, content in files.items():
        (partial / name).write_bytes(content)
    names = (f"{number:04d}-step-{step}" for number in itertools.count(first))
    entry = next(history / name for name in names if not any(history.glob(f"{name[:4]}-*")))
    partial.rename(entry)
    return entry


def _git_state(folder: Path) -> dict[str, bytes]:
    """Return the commit of the checkout that contains ``folder``, and the difference to it, as files; else empty."""
    if not any((parent / ".git").exists() for parent in (folder.resolve(), *folder.resolve().parents)):
        return {}
    commit = _git(folder, "rev-parse", "HEAD")
    difference = _git(folder, "diff", "--no-ext-diff", "--no-color", "--binary", "HEAD")
    files = {"git-commit.txt": commit, "git-diff.patch": difference}
    return {name: content for name, content in files.items() if content}


def _git(folder: Path, *words: str) -> bytes:
    """Return the output of a git command; empty if it fails."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_GIT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return b""
    return done.stdout if done.returncode == 0 else b""
