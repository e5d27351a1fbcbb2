"""Numbers and options of a run in Weights & Biases or MLflow; chief only.

The services' own environment variables, such as ``WANDB_MODE`` and ``MLFLOW_TRACKING_URI``, determine where they
record. A run that resumes continues its record in the service; ``logger.json`` in the run directory has the record's
id.
"""

from __future__ import annotations

import importlib.util
import json
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from ..core.words import one_line
from ..errors import ConfigError
from .heartbeat import State

Tables = Mapping[str, Mapping[str, Any]]

_RECORD = "logger.json"
_log = logging.getLogger(__name__)


class Service(Protocol):
    """A service that records runs. Its methods may raise any exception.

    Attributes:
        id: The service's id of the run.
    """

    id: str

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record numbers measured at a step."""

    def close(self, state: State) -> None:
        """Record how the run has ended."""


class Wandb:
    """Weights & Biases.

    Args:
        folder: The run directory; it has the name of the run.
        tables: The run's options, the job's arguments and versions.
        former: The id of the run to continue, or None.
    """

    def __init__(self, folder: Path, tables: Tables, former: str | None) -> None:
        import wandb

        self._run = wandb.init(
            id=former,
            resume="allow",
            name=folder.resolve().name,
            dir=str(folder),
            config={name: dict(table) for name, table in tables.items()},
            settings=wandb.Settings(console="off"),
        )
        self.id = str(self._run.id)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self, state: State) -> None:
        self._run.finish(exit_code=int(state == "failed"))


class Mlflow:
    """MLflow; see ``Wandb`` for the arguments."""

    def __init__(self, folder: Path, tables: Tables, former: str | None) -> None:
        import mlflow

        self._mlflow = mlflow
        self.id = str(mlflow.start_run(run_id=former, run_name=folder.resolve().name).info.run_id)
        if former is None:  # parameters of a run cannot change
            mlflow.log_params({f"{table}.{name}": item for table in tables for name, item in tables[table].items()})

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._mlflow.log_metrics(dict(values), step=step)

    def close(self, state: State) -> None:
        self._mlflow.end_run({"failed": "FAILED", "stopped": "KILLED"}.get(state, "FINISHED"))


_SERVICES: dict[str, Callable[[Path, Tables, str | None], Service]] = {"wandb": Wandb, "mlflow": Mlflow}


def check_installed(name: str) -> None:
    """Check that the package of a service is installed, without importing it.

    Args:
        name: The value of ``--logger``.

    Raises:
        ConfigError: The package is not installed.
    """
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:  # a folder of this name is not a package
        raise ConfigError(f"--logger {name} requires {name}; run pip install 'mpitrain[{name}]'")


class Logger:
    """Passes a run's numbers to a service. If this fails, one warning is logged, and the run continues without the
    service.

    Args:
        name: The value of ``--logger``.
        folder: The run directory.
        tables: The run's options, the job's arguments and versions.
        resumes: Whether the run continues an earlier attempt.

    Raises:
        ConfigError: The service cannot be used.
        OSError: The run directory cannot be written.
    """

    def __init__(self, name: str, folder: Path, tables: Tables, resumes: bool) -> None:
        self._name = name
        try:
            self._service: Service | None = _SERVICES[name](folder, tables, _ids(folder).get(name) if resumes else None)
        except Exception as error:
            text = one_line(error)
            raise ConfigError(f"--logger {name} cannot be used: {type(error).__name__}: {text}") from error
        (folder / _RECORD).write_text(json.dumps({**_ids(folder), name: self._service.id}) + "\n", encoding="utf-8")

    def log(self, step: int, measured: Mapping[str, Any]) -> None:
        """Record the numbers among the values measured at a step."""
        values = {name: float(value) for name, value in measured.items() if isinstance(value, (int, float))}
        if values:
            self._guard(lambda service: service.log(step, values))

    def close(self, state: State) -> None:
        """Record how the run has ended."""
        self._guard(lambda service: service.close(state))

    def _guard(self, write: Callable[[Service], None]) -> None:
        if self._service is None:
            return
        try:
            write(self._service)
        except Exception as error:
            self._service = None
            text = one_line(error)
            _log.warning("no further records of --logger %s: %s: %s", self._name, type(error).__name__, text)


def _ids(folder: Path) -> dict[str, str]:
    """Return the ids of the run by service."""
    with suppress(OSError, ValueError):
        ids = json.loads((folder / _RECORD).read_bytes())
        return ids if isinstance(ids, dict) else {}
    return {}
