"""Flushing subnormal numbers to zero: in threads, kernels and BLAS, and only where it is requested."""

from __future__ import annotations

import logging
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from mpitrain.core import subnormals
from mpitrain.core.kernels import kernel
from mpitrain.training.hooks import KeepFlushing
from mpitrain.training.resources import restart_blas_threads

TINY = np.array([0x1000], np.uint32).view(np.float32)  # 5.7e-42


@kernel
def double(values: np.ndarray) -> None:
    for i in range(values.size):
        values[i] *= 2


def doubled(how: str) -> int:
    """Return the bits of twice a subnormal number."""
    found = TINY.copy()
    if how == "numba":
        double(found)
    elif how == "blas":
        twice = np.zeros((64, 512), np.float32)
        twice[0] = 2
        found = np.full((512, 64), TINY) @ twice  # by several threads
        assert len(np.unique(found)) == 1
    else:
        found = found * 2
    return int(found.view(np.uint32).flat[0])


@pytest.mark.parametrize("how", ["numpy", "numba", "blas"])
def test_numbers_are_flushed_inside_the_block_only(how: str) -> None:
    assert doubled(how) == 0x2000
    with subnormals.flushed(True):
        restart_blas_threads()
        assert subnormals.are_flushed() and doubled(how) == 0
        with subnormals.flushed(False):
            restart_blas_threads()
            assert not subnormals.are_flushed() and doubled(how) == 0x2000
        restart_blas_threads()
        assert doubled(how) == 0
    restart_blas_threads()
    assert not subnormals.are_flushed() and doubled(how) == 0x2000


def test_an_exception_restores_the_mode() -> None:
    with pytest.raises(KeyError), subnormals.flushed(True):
        raise KeyError
    assert not subnormals.are_flushed()


def test_threads_inherit_the_mode() -> None:
    found: list[int] = []
    with subnormals.flushed(True):
        thread = threading.Thread(target=lambda: found.append(doubled("numba")))
        thread.start()
        thread.join()
    assert found == [0]


def test_the_mode_is_kept_and_a_change_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    hook, loop = KeepFlushing(), SimpleNamespace(step=0)
    with subnormals.flushed(True), caplog.at_level(logging.WARNING):
        hook.begin(loop)
        for loop.step in range(1, 1001):
            if loop.step % 250 == 0:
                subnormals.flush(False)  # as a library may do
            hook.after_step(loop)
        assert subnormals.are_flushed()
    assert len(caplog.records) == 1
