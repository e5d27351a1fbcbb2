"""The emulation detects errors in kernels; if it did not, the tests of kernels that use it would prove little."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from mpitrain.gpu import ops as launch

from ...simulators.emulation.kernels import EmulatedKernels, build, put
from ...simulators.simulated_gpus import KERNELS

pytestmark = pytest.mark.full
HERE = Path(__file__).parents[2] / "simulators" / "emulation"


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled kernels of wrong.cu, which have errors."""
    folder = tmp_path_factory.mktemp("wrong")
    for source in (HERE / "wrong.cu", KERNELS / "common.cuh"):
        shutil.copy(source, folder)
    return build(folder, {folder / "wrong.cu": ["float"]})


def run(library: Path, name: str, n: int, shift: int = 0, is_reversed: bool = False) -> np.ndarray:
    x = put(np.zeros(n, np.float32), shift)
    kernel = launch.Kernel("sum", name, "float")
    EmulatedKernels(library, is_reversed).launch(kernel, (1, 1), (256, 1), (x, np.int64(n)))
    return x


@pytest.mark.parametrize(
    ("name", "n", "shift", "expected"),
    [
        ("some_skip_the_barrier", 40, 0, "divergence"),
        ("some_leave_the_warp", 40, 0, "divergence"),
        ("two_barriers", 64, 0, "different places"),
        ("one_value_too_far", 40, 0, "an access of 4 bytes outside all arrays"),
        ("a_pack_too_far", 42, 0, "an access of 16 bytes outside all arrays"),
        ("a_pack_too_far", 40, 1, "not aligned"),
        ("shared_too_far", 40, 0, "an index outside a shared array"),
        ("stwb_to_shared", 40, 0, "global memory to a shared array"),
    ],
)
def test_what_is_wrong_is_reported(wrong: Path, name: str, n: int, shift: int, expected: str) -> None:
    with pytest.raises(AssertionError, match=expected):
        run(wrong, name, n, shift)


@pytest.mark.parametrize("name", ["race", "last_writer", "one_barrier_too_few"])
def test_a_race_gives_other_bits_in_the_other_order(wrong: Path, name: str) -> None:
    assert run(wrong, name, 200).tobytes() != run(wrong, name, 200, is_reversed=True).tobytes()


def test_it_runs_after_a_failure(wrong: Path) -> None:
    with pytest.raises(AssertionError):
        run(wrong, "some_skip_the_barrier", 40)
    run(wrong, "some_skip_the_barrier", 256)


@pytest.mark.parametrize(
    "arguments",
    [
        (np.zeros(3), np.int64(3)),
        (np.zeros(3, np.float32), np.int32(3)),
        (np.zeros(3, np.float32), 3),
        (np.zeros(3, np.float32),),
    ],
)
def test_arguments_of_another_type_are_refused(wrong: Path, arguments: tuple[object, ...]) -> None:
    with pytest.raises(AssertionError):
        EmulatedKernels(wrong).launch(launch.Kernel("sum", "race", "float"), (1, 1), (256, 1), arguments)


def test_arrays_that_are_not_contiguous_are_refused(library: Path) -> None:
    launch.use(EmulatedKernels(library))
    with pytest.raises(AssertionError, match="C-contiguous"):
        launch.add(*[np.zeros((4, 4), np.float32)[:, :2]] * 3)
