"""Operations of the backend of torch.distributed with many types, shapes and reductions, on one node and on two."""

from __future__ import annotations

import json

import pytest

from ..support.launch import PROGRAMS, Mpi, run
from ..support.world.controller import World


def results(mpi: Mpi, n: int) -> dict[str, object]:
    done = mpi.run(n, "-W", "ignore", PROGRAMS / "backend_collectives.py", timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.quick
@pytest.mark.parametrize("n", [1, 2])
def test_operations_agree_with_sums_of_each_rank(world: World, n: int) -> None:
    done = world.run(n, PROGRAMS / "backend_collectives.py", timeout=240)
    assert json.loads(done.stdout.splitlines()[-1])["checks"] > 500


@pytest.mark.parametrize("ranks_per_node", ["1", "2"])
def test_operations_on_several_nodes(world: World, ranks_per_node: str) -> None:
    done = world.run(3, PROGRAMS / "backend_collectives.py", ranks_per_node, timeout=240)
    assert json.loads(done.stdout.splitlines()[-1])["checks"] > 500


def test_the_bits_do_not_depend_on_the_run_or_the_library(openmpi: Mpi, mpich_with_torch: Mpi) -> None:
    assert results(openmpi, 3) == results(mpich_with_torch, 3)


def test_the_default_device_does_not_matter(world: World) -> None:
    """A script may have called ``torch.set_default_device("cuda")``."""
    world.run(2, PROGRAMS / "backend_default_device.py")


def test_one_process_without_a_launcher(openmpi: Mpi) -> None:
    program = (
        "import torch, torch.distributed as dist; dist.init_process_group('mpitrain', init_method='mpitrain://'); "
    )
    program += "t = torch.ones(3); dist.all_reduce(t); print(t.tolist(), dist.get_world_size())"
    done = run([str(openmpi.python), "-c", program])
    assert done.stdout.split("\n")[0] == "[1.0, 1.0, 1.0] 1", done.stderr
