"""Learners on two hosts, whose folder is on a network file system."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpitrain.process import rank_status

from ..launcher.test_learners import end, ledger, position, state, states
from ..support.hosts.shared_folder import SFTP, SharedFolder, share
from ..support.hosts.training import Hosts
from ..support.launch import JOBS, missing
from ..support.waiting import wait_until


@pytest.fixture
def shared(hosts: Hosts, tmp_path: Path) -> Iterator[SharedFolder]:
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR))
    except OSError as error:
        pytest.skip(f"no file system in user space: {error}")
    if shutil.which("sshfs") is None or not Path(SFTP).exists():
        missing("sshfs and openssh-sftp-server")
    with share(hosts.network, tmp_path, 3, [1, 2]) as folder:
        yield folder


def start(shared: SharedFolder, number: int) -> subprocess.Popen[str]:
    join = "--join", shared.mounted / "run", "--run-dir", shared.mounted / "run" / "learners" / str(number)
    words = JOBS / "slow.py", "--pause", "0.01", "--train-steps", 2000
    command = shared.on(number, sys.executable, "-m", "mpitrain", "run", "-n", 1, *join, *words)
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=subprocess.STDOUT, text=True, start_new_session=True)


def test_learners_that_start_at_once_train_over_a_network_file_system(shared: SharedFolder) -> None:
    """The one that merges is killed, and started again."""
    folder = shared.served / "run"
    processes = {number: start(shared, number) for number in (1, 2)}
    try:
        for number in processes:
            wait_until(lambda number=number: state(folder, number).get("examples", 0) > 100, lambda: states(folder))
        killed = int(ledger(folder).holder)
        for status in rank_status.read(folder / "learners" / str(killed)):
            os.kill(status.pid, signal.SIGKILL)
        os.killpg(processes[killed].pid, signal.SIGKILL)
        wait_until(lambda: ledger(folder).holder == str(3 - killed), "the other learner merges")
        processes[killed] = start(shared, killed)
        for process in processes.values():
            end(process)
    finally:
        for process in processes.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    book = ledger(folder)
    assert book.is_given_out and not book.living and not book.free
    assert book.members[str(killed)].generation > 2 and position(folder) >= book.total
