"""Requests to scale a run: one at a time, and each caller gets the answer to its own request."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mpitrain.errors import LaunchError
from mpitrain.launcher.scaling import ScaleRequest, answer_request, read_request, remove_request, send_request
from mpitrain.process.run_directory import SCALE_REQUEST, forget_launcher, record_launcher

from ...support.waiting import wait_until


def _wait_for_request(run_dir: Path) -> ScaleRequest:
    return wait_until(lambda: read_request(run_dir), "a request")


def test_one_request_at_a_time_gets_its_own_answer(tmp_path: Path) -> None:
    record_launcher(tmp_path)
    with ThreadPoolExecutor() as pool:
        accepted = pool.submit(send_request, tmp_path, ScaleRequest(ranks=3))
        first = _wait_for_request(tmp_path)
        with pytest.raises(LaunchError):
            send_request(tmp_path, ScaleRequest(ranks=4))
        assert read_request(tmp_path) == first and first.ranks == 3
        answer_request(tmp_path, first, "")
        accepted.result()
        assert read_request(tmp_path) == first  # the request remains until the ranks have ended
        remove_request(tmp_path)
        refused = pool.submit(send_request, tmp_path, ScaleRequest(hosts="a:2"))
        answer_request(tmp_path, _wait_for_request(tmp_path), "no such host")
        with pytest.raises(LaunchError, match="no such host"):
            refused.result()
    assert read_request(tmp_path) is None


def test_a_run_that_ends_does_not_answer(tmp_path: Path) -> None:
    record_launcher(tmp_path)
    threading.Timer(0.3, forget_launcher, [tmp_path]).start()
    with pytest.raises(LaunchError):
        send_request(tmp_path, ScaleRequest(ranks=3))
    assert not any(path.name.startswith(SCALE_REQUEST) for path in tmp_path.iterdir())


def test_a_malformed_request_is_removed(tmp_path: Path) -> None:
    (tmp_path / SCALE_REQUEST).write_text('{"number": 1}')
    assert read_request(tmp_path) is None
    assert not any(tmp_path.iterdir())
