"""Every option of a run, validated in one place."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from .errors import ConfigError


def _option(default: Any, help: str, metavar: str | None = None) -> Any:
    return field(default=default, metadata={"help": help, "metavar": metavar})


@dataclass(frozen=True)
class RunConfig:
    """How a job is trained. Options left at None are the job file's to choose.

    Raises:
        ConfigError: An option is out of range; the message says what is valid.
    """

    mode: Literal["sync"] = _option("sync", "How the ranks agree on the parameters.")
    batch_size: int | None = _option(None, "Examples a worker takes for one step.", "N")
    train_steps: int | None = _option(None, "Stop after this step.", "N")
    accumulate_steps: int = _option(1, "Compute a worker's batch in this many parts, to save memory.", "N")
    seed: int = _option(0, "Decides initial values, the order of examples and dropout.", "N")
    device: Literal["auto", "cpu"] = _option("auto", "Where to compute.")
    dtype: Literal["float32", "float64"] = _option("float32", "Type of parameters and of all arithmetic.")
    run_dir: Path | None = _option(None, "Folder for everything the run leaves.  [default: runs/JOB-TIME]", "DIR")
    resume: str = _option(
        "auto",
        "auto: go on from the run directory's newest checkpoint; never; or a checkpoint.",
        "auto|never|PATH",
    )
    log_steps: int = _option(100, "Report the loss every N steps; 0 for never.", "N")
    validate_steps: int = _option(1000, "Validate every N steps; 0 for only at the end.", "N")
    save_steps: int = _option(0, "Save a checkpoint every N steps; 0 for only at the end.", "N")
    nan: Literal["stop", "skip", "ignore"] = _option("stop", "What to do when the loss is not finite.")
    threads: int | None = _option(None, "BLAS threads of a rank.  [default: the node's cores / its ranks]", "N")
    shared_memory: bool = _option(True, "Average in memory that the ranks of a node share.")
    bucket_bytes: int = _option(1 << 20, "Average gradients in ranges of at least so many bytes.", "BYTES")

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{flag(name)} is {value}: give {least} or more")

    def merged(self, defaults: Mapping[str, Any]) -> RunConfig:
        """A copy in which ``defaults`` fill what was left at None."""
        known = {f.name for f in dataclasses.fields(self)}
        missing = {n: v for n, v in defaults.items() if n in known and getattr(self, n) is None}
        return dataclasses.replace(self, **missing)

    def as_toml(self) -> dict[str, Any]:
        """The options as TOML has them: paths as text, nothing for None."""
        return plain(dataclasses.asdict(self))


_LEAST = {
    "batch_size": 1,
    "train_steps": 0,
    "accumulate_steps": 1,
    "seed": 0,
    "log_steps": 0,
    "validate_steps": 0,
    "save_steps": 0,
    "threads": 1,
    "bucket_bytes": 0,
}


def flag(name: str) -> str:
    """The command line's name of an option or parameter."""
    return "--" + name.replace("_", "-")


def plain(options: Mapping[str, Any]) -> dict[str, Any]:
    """Values that TOML and JSON can hold; None is left out, what has no form there becomes its text."""
    return {name: _plain(value) for name, value in options.items() if value is not None}


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if isinstance(value, (bool, int, float, str)) else str(value)
