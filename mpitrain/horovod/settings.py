"""Horovod's environment variables."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import ConfigError

# Variables that Horovod's launcher sets, or that select its build; programs may read them, but this package does not.
_UNUSED = {"HOROVOD_DYNAMIC_PROCESS_SETS", "HOROVOD_ELASTIC", "HOROVOD_CONTROLLER", "HOROVOD_CPU_OPERATIONS"}


@dataclass(frozen=True)
class Settings:
    """The settings of the engine.

    Attributes:
        fusion_bytes: Maximum size in bytes of a buffer in which several tensors are fused; 0 turns fusion off.
        cycle_s: Seconds between two cycles that no thread waits for.
        stall_s: Seconds after which a tensor that some ranks have not submitted is reported; None for never.
        shutdown_s: Seconds after which such a tensor is an error; None for never.
        timeline: File of the timeline that starts with ``init``; empty for none.
        mark_cycles: Whether that timeline shows negotiations.
        without_effect: Names of variables of Horovod that are set and have no effect.
    """

    fusion_bytes: int = 128 << 20
    cycle_s: float = 1e-3
    stall_s: float | None = 60.0
    shutdown_s: float | None = None
    timeline: str = ""
    mark_cycles: bool = False
    without_effect: tuple[str, ...] = ()


def from_environment(environ: Mapping[str, str]) -> Settings:
    """Return the settings from the variables ``HOROVOD_*``.

    Raises:
        ConfigError: A value is not a finite number >= 0.
    """
    used = set()

    def number(name: str, default: float) -> float:
        used.add(name)
        text = environ.get(name, "")
        try:
            value = float(text) if text else default
        except ValueError:
            raise ConfigError(f"{name}={text} is not a number") from None
        if not 0 <= value < math.inf:
            raise ConfigError(f"{name}={text} is not a finite number >= 0")
        return value

    def flag(name: str) -> bool:
        return number(name, 0) > 0

    timeline = environ.get("HOROVOD_TIMELINE", "")
    used.add("HOROVOD_TIMELINE")
    stall_s = number("HOROVOD_STALL_CHECK_TIME_SECONDS", 60)
    shutdown_s = number("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", 0)
    settings = Settings(
        fusion_bytes=int(number("HOROVOD_FUSION_THRESHOLD", Settings.fusion_bytes)),
        cycle_s=number("HOROVOD_CYCLE_TIME", 1e3 * Settings.cycle_s) / 1e3,
        stall_s=None if flag("HOROVOD_STALL_CHECK_DISABLE") else stall_s,
        shutdown_s=shutdown_s or None,
        timeline="" if timeline == "DYNAMIC" else timeline,
        mark_cycles=flag("HOROVOD_TIMELINE_MARK_CYCLES"),
    )
    unused = tuple(sorted(name for name in environ if name.startswith("HOROVOD_") and name not in used | _UNUSED))
    return Settings(**{**vars(settings), "without_effect": unused})
