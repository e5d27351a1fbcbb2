"""How the times of steps vary: as measured, as recorded in a file, or as a distribution."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ..errors import ConfigError
from .measurements import Probe

_QUANTILES = 500


def step_factors(text: str, probe: Probe) -> tuple[float, ...]:
    """Return the factors of the compute time from which the factors of steps are drawn.

    Args:
        text: ``measured``, ``equal``, ``lognormal:SIGMA``, or the path of a file with one time of a step in each line.

    Raises:
        ConfigError: The text is none of these.
    """
    name, _, number = text.partition(":")
    if text == "measured":
        return probe.step_factors
    if text == "equal":
        return (1.0,)
    if name == "lognormal":
        return _lognormal(text, number)
    try:
        times = np.array(Path(text).read_text(encoding="utf-8").split(), np.float64)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--step-times {text}: must be measured, equal, lognormal:SIGMA, or a file with one time in each line"
        ) from error
    if not len(times) or not (times > 0).all():
        raise ConfigError(f"--step-times {text}: the file must have times above 0, one in each line")
    return tuple((times / np.median(times)).tolist())


def _lognormal(text: str, number: str) -> tuple[float, ...]:
    try:
        sigma = float(number)
    except ValueError:
        sigma = -1.0
    if not 0 <= sigma < 5:
        raise ConfigError(f"--step-times {text}: SIGMA must be a number >= 0 and < 5, such as lognormal:0.2")
    normal = np.sort(np.random.default_rng(0).standard_normal(_QUANTILES))
    return tuple(np.exp(sigma * normal).tolist())
