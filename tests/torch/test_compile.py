"""Modules that ``torch.compile`` has wrapped train like the modules that they wrap."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mpitrain
from mpitrain import Job

from ..support.launch import missing
from . import models
from .support import Local


def compiled(kind: str, backend: str | Callable[..., Any], normalize: str = "own") -> Job:
    """Return a job with SGD whose model is compiled."""
    job = models.job(kind, "sgd", normalize)
    job.model = torch.compile(job.model, backend=backend)
    return job


def assert_trains(kind: str, backend: str) -> None:
    """Train a compiled module and the module itself; the parameters must agree."""
    ours, plain = Local(lambda: compiled(kind, backend)), Local(lambda: models.job(kind, "sgd", "own"))
    ours.train(), plain.train()
    assert ours.state().keys() == plain.state().keys()
    kept, expected = (
        {group: sorted(part.values) for group, part in each.model.extra_state().items()} for each in (ours, plain)
    )
    assert kept == expected
    np.testing.assert_allclose(ours.params, plain.params, atol=1e-12, rtol=0)


@pytest.mark.parametrize("kind", ["cnn", "gpt"])  # the gpt has its own buffer
def test_a_compiled_module_trains_as_the_module(kind: str) -> None:
    assert_trains(kind, "eager")


def test_the_default_compiler_trains_as_the_module() -> None:
    if shutil.which("g++") is None:
        missing("g++, which torch.compile calls")
    assert_trains("cnn", "inductor")


def test_communication_is_not_compiled() -> None:
    traces: list[str] = []

    def record(graph: torch.fx.GraphModule, inputs: object) -> torch.fx.GraphModule:
        traces.extend(node.stack_trace or "" for node in graph.graph.nodes)
        return graph

    ours = Local(lambda: compiled("cnn", record, "sync"), devices_per_rank=2)
    plain = Local(lambda: models.job("cnn", "sgd", "own"))
    ours.train(), plain.train()
    np.testing.assert_allclose(ours.params, plain.params, atol=1e-12, rtol=0)
    package = str(Path(mpitrain.__file__).parent)
    assert traces and not [each for each in traces if package in each]
