"""Horovod's API: values of its operations, and training, against plain torch."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from torch import nn

from ..support.launch import PROGRAMS, Mpi
from ..support.world.controller import World


def printed(done: object) -> dict[str, object]:
    """Return the JSON object that rank 0 has printed."""
    assert done.returncode == 0, done.stdout + done.stderr  # type: ignore[attr-defined]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("{")]  # type: ignore[attr-defined]
    return json.loads(line)  # type: ignore[no-any-return]


@pytest.mark.parametrize("n", [1, 2, 3])
def test_operations(world: World, n: int) -> None:
    assert printed(world.run(n, PROGRAMS / "horovod_operations.py", timeout=120))["checks"] > 100


def test_operations_on_two_nodes(world: World) -> None:
    assert printed(world.run(3, PROGRAMS / "horovod_operations.py", "2", timeout=120))["checks"] > 100


def test_operations_with_mpich(mpich_with_torch: Mpi) -> None:
    done = mpich_with_torch.run(2, "-W", "ignore", PROGRAMS / "horovod_operations.py", timeout=120)
    assert printed(done)["checks"] > 100


def test_process_sets_of_init(world: World) -> None:
    first, second, third = printed(world.run(3, PROGRAMS / "horovod_sets.py", timeout=90))["found"]  # type: ignore[misc]
    assert first == {"parity": 2.0, "ranks": [0, 2], "rank": [0, 2, True], "first two": 2.0}
    assert second == {"parity": 1.0, "ranks": [1], "rank": [0, 1, True], "first two": 2.0, "some": [0, 2, 2.0]}
    assert third == {"parity": 2.0, "ranks": [0, 2], "rank": [1, 2, False], "first two": False, "some": [1, 2, 2.0]}


def plain_training(optimizer: str, rows: int) -> tuple[np.ndarray, list[float]]:
    """Train with the global batch in one process, as ``horovod_training.py`` does on all ranks together.

    Returns:
        The parameters, and the losses that ``step`` returns.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    rule = getattr(torch.optim, optimizer)(model.parameters(), lr=0.05)
    data = torch.randn(rows, 6, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    losses = []
    for step in range(5):

        def compute(step: int = step) -> torch.Tensor:
            rule.zero_grad()
            loss = model(data + step).square().mean()
            loss.backward()
            return loss

        if optimizer == "LBFGS":
            losses.append(rule.step(compute).item())
            continue
        compute()
        if step == 3:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        rule.step()
    return torch.cat([parameter.detach().view(-1) for parameter in model.parameters()]).numpy(), losses


@pytest.mark.quick
@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (2, {"optimizer": "Adam"}),
        (3, {"optimizer": "SGD", "backward_passes_per_step": 2, "gradient_predivide_factor": 2.0}),
        (2, {"optimizer": "SGD", "groups": 2}),
        (2, {"optimizer": "LBFGS"}),
    ],
)
def test_training_equals_a_plain_loop(world: World, ranks: int, options: dict[str, object]) -> None:
    rows = 12
    done = world.run(ranks, PROGRAMS / "horovod_training.py", json.dumps({**options, "rows": rows}), timeout=90)
    result = printed(done)
    assert result["equal"]
    parameters, losses = plain_training(str(options["optimizer"]), rows)
    np.testing.assert_allclose(result["parameters"], parameters, atol=1e-10)
    np.testing.assert_allclose(result["losses"], losses, rtol=1e-10)
