"""Programs that ranks can run in place of jobs and scripts that train; they need not use this package."""

from __future__ import annotations

import itertools
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..core.activity import LONG_LIMIT_S, PATIENT_LIMIT_S, TIMES_LONGEST
from ..errors import ConfigError, LaunchError
from .option import OptionGroup, option
from .options import group_words
from .script import only_defines

# Commands and modules that start ranks themselves, which ``mpitrain run -n N`` replaces.
_STARTERS = ("torchrun", "mpirun", "mpiexec", "srun", "horovodrun", "deepspeed")
_STARTER_COMMANDS = (("accelerate", "launch"), ("mpitrain", "run"))
_STARTER_MODULES = ("torch.distributed.run", "torch.distributed.launch")


@dataclass(frozen=True)
class ProgramOptions(OptionGroup):
    """Options of programs that ranks execute."""

    run_dir: Path | None = option(None, "Output directory.", "DIR", default_text="runs/PROGRAM-TIME")
    time_limit: float | None = option(
        None,
        "Ask the program to stop before S seconds have passed; Slurm's limit (SLURM_JOB_END_TIME) always applies.",
        "S",
        minimum=1,
    )
    stop_secs: float | None = option(
        None,
        "Ask the program to stop S seconds before the time limit.",
        "S",
        minimum=0,
        default_text="60, at most 5 % of the time",
    )
    signal: str = option(
        "TERM", "Signal that asks the program to stop.", choices=("TERM", "INT", "USR1", "USR2", "HUP")
    )
    hang_timeout: float | None = option(
        None,
        "End the run and report the rank if a rank has not called mpitrain.progress() for S seconds; 0: never.",
        "S",
        minimum=0,
        default_text=f"{TIMES_LONGEST} times the longest pause so far, at least {PATIENT_LIMIT_S:g}",
    )
    long_timeout: float = option(
        LONG_LIMIT_S, "Without --hang-timeout: the limit before the second call of mpitrain.progress().", "S", minimum=1
    )


@dataclass(frozen=True)
class ProgramRequest:
    """A program and the options of the run: a ``plan.request.Workload``.

    Attributes:
        argv: The command that every rank executes, with its arguments.
        name: The name of the run in the run directory's name and in tables.
        options: The options of the run.
    """

    argv: tuple[str, ...]
    name: str
    options: ProgramOptions = field(default_factory=ProgramOptions)

    command = "exec"
    keeps_checkpoints = False
    resumes = True

    @property
    def words(self) -> list[str]:
        return [*group_words(self.options), "--", *self.argv]

    @property
    def run_dir(self) -> Path | None:
        return self.options.run_dir

    join = None

    @property
    def time_limit(self) -> float | None:
        return self.options.time_limit

    @property
    def source(self) -> Path:
        """The file of the program if it is a script, else the name of the program, which may not exist as a file."""
        scripts = [word for word in self.argv[:2] if word.endswith(".py")]
        return Path(scripts[0] if scripts else self.name)

    def check_ranks(self, ranks: int) -> None:
        """Any number of ranks can execute a program."""

    def restarted(self, checkpoint: Path | None, time_limit: float | None) -> ProgramRequest:
        return self if time_limit is None else self.with_options(time_limit=time_limit)

    def with_options(self, **options: Any) -> ProgramRequest:
        return replace(self, options=replace(self.options, **options))


def script_request(path: Path, arguments: Sequence[str], options: ProgramOptions) -> ProgramRequest:
    """Return the request for a Python script.

    Raises:
        LaunchError: The path is not a file, or the script only defines functions or classes.
    """
    if not path.is_file():
        raise LaunchError(f"{path}: no such file")
    if only_defines(path):
        raise LaunchError(
            f"{path} only defines functions or classes: a job file must define job(), and a script must call its "
            f"functions; to start it anyway, pass -- python {path}"
        )
    return ProgramRequest((sys.executable, str(path), *arguments), path.stem, options)


def module_request(module: str, arguments: Sequence[str], options: ProgramOptions) -> ProgramRequest:
    """Return the request for a Python module, as of ``python -m MODULE``.

    Raises:
        LaunchError: The module starts ranks itself.
    """
    if module in _STARTER_MODULES:
        raise _starts_ranks(module)
    return ProgramRequest((sys.executable, "-m", module, *arguments), module.rpartition(".")[2], options)


def command_request(words: Sequence[str], options: ProgramOptions) -> ProgramRequest:
    """Return the request for a command.

    Raises:
        LaunchError, ConfigError: There is no such program, the program starts ranks itself, or there are no words.
    """
    if not words:
        raise ConfigError("there is no command after --; give one, such as -- python train.py")
    program = words[0]
    name = Path(program).name
    modules = [word for flag, word in itertools.pairwise(words) if flag == "-m"]
    if name in _STARTERS or (name.startswith("python") and modules[:1] and modules[0] in _STARTER_MODULES):
        raise _starts_ranks(modules[0] if modules and name.startswith("python") else name)
    if (name, *words[1:2]) in _STARTER_COMMANDS:
        raise _starts_ranks(f"{name} {words[1]}")
    if shutil.which(program) is None:
        why = (
            "is not executable" if os.path.exists(program) else "is not on PATH" if "/" not in program else "is missing"
        )
        if shutil.which((program.split() or [""])[0]) is not None:
            hint = "; it is one argument: give its words without quotation marks"
        elif program.endswith(".py"):
            hint = f"; to run a Python script, leave out --, or pass -- python {program}"
        else:
            hint = ""
        raise LaunchError(f"the command {program} {why}{hint}")
    return ProgramRequest(tuple(words), _name_of(words), options)


def _name_of(words: Sequence[str]) -> str:
    """Return the name of a command: of its program, or of the script or module that Python executes."""
    program = Path(words[0]).name
    if not program.startswith("python"):
        return program
    for word, following in zip(words[1:], [*words[2:], ""], strict=True):
        if word == "-m" and following:
            return following.rpartition(".")[2]
        if not word.startswith("-"):
            return Path(word).stem
    return program


def _starts_ranks(starter: str) -> LaunchError:
    return LaunchError(
        f"{starter} starts ranks itself, and each rank of mpitrain run would start all of them: "
        "pass its program instead, such as mpitrain run -n 4 train.py"
    )
