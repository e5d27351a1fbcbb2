"""Contradictory options are rejected; the message names the options and their values."""

from __future__ import annotations

import math

import pytest

from mpitrain.errors import ConfigError
from mpitrain.plan.config import RunConfig


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "asnyc"}, "--mode .*asnyc.*did you mean .async"),
        ({"mode": "json:"}, "--mode .*package.module:Class"),
        ({"staleness": 2}, "--staleness .*--mode ssp"),
        ({"staleness": 0}, "--staleness .*--mode ssp"),
        ({"mode": "async", "staleness": 2}, "--staleness .*async"),
        ({"ps": 1}, "--ps .*--mode async"),
        ({"mode": "local", "ps": 1}, "--ps .*--mode async"),
        ({"mode": "async", "backup_workers": 0}, "--backup-workers .*--mode backup"),
        ({"mode": "backup", "local_steps": 3}, "--local-steps .*--mode local"),
        ({"elastic_rho": 0.5}, "--elastic-rho .*--mode local"),
        ({"mode": "local", "elastic_rho": 1.5}, r"--elastic-rho is 1\.5"),
        ({"outer_optimizer": "sgd"}, "--outer-optimizer .*--mode local"),
        ({"mode": "local", "fragments": 2}, "--fragments 2 .*--outer-optimizer"),
        ({"mode": "local", "compress": "int8"}, "--compress int8 .*--outer-optimizer"),
        ({"mode": "local", "outer_optimizer": "sgd", "outer_momentum": 0.5}, "--outer-momentum 0.5 .*nesterov"),
        ({"mode": "local", "outer_optimizer": "sgd", "elastic_rho": 0.5}, "--elastic-rho 0.5 .*--outer-optimizer"),
        ({"mode": "local", "outer_optimizer": "sgd", "fragments": 9}, "--fragments 9 .*--local-steps 8"),
        ({"mode": "local", "outer_optimizer": "sgd", "fragments": 3, "overlap_steps": 2}, "--overlap-steps 2 .*<= 1"),
        ({"mode": "local", "outer_optimizer": "sgd", "compress": "topk:0.1"}, "--compress topk.*int4"),
        ({"compress": "int4"}, "--compress int4 .*sync.*powersgd:RANK.*package.module:Class"),
        ({"compress": ""}, "--compress is ''"),
        ({"compress": "float32"}, "--compress float32 .*--dtype float32"),
        ({"mode": "local", "outer_optimizer": "sgd", "outer_learning_rate": math.inf}, "--outer-learning-rate is inf"),
        ({"mode": "ssp", "prefetch_params": True}, "--prefetch-params .*--mode async"),
        ({"mode": "backup", "staleness_scaling": True}, "--staleness-scaling .*backup"),
        ({"mode": "async", "ps": 1, "ps_hosts": ["a", "b"]}, "--ps-hosts .*a, b.*--ps 1"),
        ({"mode": "ssp", "staleness": -1}, "--staleness is -1.*0"),
        ({"ps": -1}, "--ps is -1.*0"),
        ({"placement": "greedy"}, "--placement .*--mode async"),
        ({"one_sided": False}, "--no-one-sided .*--mode async"),
        ({"mode": "async", "save_one_file": True}, "--save-one-file .*--mode sync"),
        ({"save_one_file": True, "save_compression": "gzip"}, "--save-compression gzip .*--save-one-file"),
    ],
)
def test_contradictions(options, message):
    with pytest.raises(ConfigError, match=message):
        RunConfig.of(**options)


@pytest.mark.parametrize(
    ("options", "ranks", "message"),
    [
        ({"mode": "async", "ps": 2}, 2, "--ps 2 .*2 ranks"),
        ({"mode": "async", "ps": 5}, 3, "--ps 5 .*6 ranks"),
        ({"mode": "backup", "backup_workers": 2}, 2, "--backup-workers is 2 .*1$"),
        ({"mode": "async", "shared_memory": False}, 2, "--no-shared-memory.*2 ranks.*--ps"),
        ({"mode": "backup", "ps": 1, "backup_workers": 1}, 2, "--backup-workers is 1 .*0$"),
    ],
)
def test_too_few_ranks_for_the_roles(options, ranks, message):
    with pytest.raises(ConfigError, match=message):
        RunConfig.of(**options).check_ranks(ranks)


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
    assert RunConfig.of(**options).gradients_per_step(workers) == taken
