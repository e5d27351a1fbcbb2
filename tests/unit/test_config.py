"""Options that contradict each other are refused, and the message says how to mend it."""

from __future__ import annotations

import pytest

from mpitrain.errors import ConfigError
from mpitrain.plan.config import RunConfig


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"staleness": 2}, "--staleness goes with --mode ssp"),
        ({"staleness": 0}, "--staleness goes with --mode ssp"),
        ({"mode": "async", "staleness": 2}, "the mode is async"),
        ({"ps": 1}, "--ps goes with"),
        ({"mode": "local", "ps": 1}, "--ps goes with"),
        ({"mode": "async", "backup_workers": 0}, "--backup-workers goes with --mode backup"),
        ({"mode": "backup", "local_steps": 3}, "--local-steps goes with --mode local"),
        ({"elastic_rho": 0.5}, "--elastic-rho goes with --mode local"),
        ({"mode": "local", "elastic_rho": 1.5}, "between 0 and 1"),
        ({"mode": "backup", "staleness_scaling": True}, "--staleness-scaling goes with"),
        ({"mode": "async", "ps": 1, "ps_hosts": ["a", "b"]}, "more hosts than --ps 1"),
        ({"mode": "ssp", "staleness": -1}, "0 or more"),
        ({"ps": -1}, "0 or more"),
        ({"placement": "greedy"}, "--placement goes with"),
        ({"one_sided": False}, "--no-one-sided goes with"),
        ({"mode": "async", "save_one_file": True}, "--save-one-file goes with"),
        ({"save_one_file": True, "save_compression": "gzip"}, "leave it or --save-one-file out"),
    ],
)
def test_contradictions(options, told):
    with pytest.raises(ConfigError, match=told):
        RunConfig(**options)


@pytest.mark.parametrize(
    ("options", "ranks", "told"),
    [
        ({"mode": "async", "ps": 2}, 2, "leaves no worker of 2 ranks"),
        ({"mode": "async", "ps": 5}, 3, "start 6 ranks"),
        ({"mode": "backup", "backup_workers": 2}, 2, "give 1 or less"),
        ({"mode": "async", "shared_memory": False}, 2, "--no-shared-memory leaves 2 ranks"),
        ({"mode": "backup", "ps": 1, "backup_workers": 1}, 2, "of 1 worker "),
    ],
)
def test_too_few_ranks_for_the_roles(options, ranks, told):
    with pytest.raises(ConfigError, match=told):
        RunConfig(**options).check_ranks(ranks)


@pytest.mark.parametrize(
    ("options", "workers", "taken"),
    [
        ({}, 4, 4),
        ({"mode": "async"}, 4, 1),
        ({"mode": "ssp"}, 4, 1),
        ({"mode": "backup"}, 4, 3),
        ({"mode": "backup"}, 1, 1),
        ({"mode": "backup", "backup_workers": 0}, 4, 4),
        ({"mode": "local"}, 4, 4),
    ],
)
def test_gradients_that_an_update_takes(options, workers, taken):
    assert RunConfig(**options).gradients_per_step(workers) == taken
