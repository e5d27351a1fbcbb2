"""Restarts from memory: killed runs end with the results of undisturbed runs."""

from __future__ import annotations

import functools
import os
import shutil
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest

from mpitrain import checkpoint
from mpitrain.checkpoint.memory import newest_state
from mpitrain.monitor.goodput import accounts_in
from mpitrain.process import fork_server, state_folder
from mpitrain.process.fork_server import import_in_server
from mpitrain.process.pid import parent_of
from mpitrain.report.history import read_run

from ..support.launch import JOBS, Mpi, one_line, run
from ..support.recovery import NO_CHECKPOINTS, TIMEOUT_S, KilledRun
from ..support.results import SMALL, assert_same_bits, final
from ..support.waiting import limit, wait_until
from ..support.world.controller import World

STEPS = 3000
FLAGS = ("--train-steps", str(STEPS), "--validate-steps", "0", "--log-steps", "0", "--threads", "1")


@pytest.fixture(scope="module")
def undisturbed(world: World, tmp_path_factory: pytest.TempPathFactory):
    """A function that returns the results of an undisturbed run, trained once for each set of flags."""

    @functools.cache
    def get(n: int, *flags: str) -> dict[str, np.ndarray]:
        folder = tmp_path_factory.mktemp("whole")
        world.train(n, SMALL, *FLAGS, *NO_CHECKPOINTS, *flags, "--run-dir", folder)
        return final(folder)

    return get


@pytest.mark.parametrize(
    ("n", "flags"),
    [(2, ()), (3, ("--no-shared-memory",)), (2, ("--mode", "local", "--local-steps", "3"))],
    ids=["sync", "nodes", "local"],
)
def test_a_killed_run_ends_with_the_bits_of_an_undisturbed_one(
    openmpi: Mpi, undisturbed, n: int, flags: tuple[str, ...], tmp_path: Path
) -> None:
    with KilledRun(openmpi, n, tmp_path / "killed", SMALL, *FLAGS, *flags, "--log-steps", "50") as killed:
        step = 0
        for number in (1, 0):
            step = killed.wait_for_state(after=step)
            killed.kill("worker", number)
        killed.end()
        resumed_at = killed.resumed_at
    assert len(resumed_at) == 2 and 0 < resumed_at[0] <= resumed_at[1]
    recorded = read_run(tmp_path / "killed")
    accounts, restarts = accounts_in(recorded.lines), recorded.restarts
    assert sum(accounts[-1].seconds.values()) == pytest.approx(accounts[-1].at - accounts[-1].since, abs=0.5)
    assert 0 < accounts[-1].step <= STEPS and {"start", "steps", "restoring"} <= {*accounts[-1].seconds}
    assert [restart.step for restart in restarts] == resumed_at
    assert all(0 < restart.seconds < 60 and 0 <= restart.repeated_steps < STEPS for restart in restarts)
    assert list(checkpoint.steps(tmp_path / "killed" / "checkpoints")) == [STEPS]
    assert_same_bits(final(tmp_path / "killed"), undisturbed(n, *flags))


@pytest.mark.full
@pytest.mark.parametrize(("mode", "role"), [("async", "worker"), ("async", "ps"), ("backup", "ps")])
def test_runs_with_servers_continue(mpi: Mpi, mode: str, role: str, tmp_path: Path) -> None:
    steps = 3 * STEPS  # so that the run does not end before the kill if the machine is busy
    flags = ("--mode", mode, "--ps", "1", "--no-normalize", "--train-steps", str(steps))
    with KilledRun(mpi, 3, tmp_path / "run", SMALL, *FLAGS, *flags) as killed:
        state_step = killed.wait_for_state()
        killed.kill(role, 0)
        killed.end()
        assert len(killed.resumed_at) == 1 and killed.resumed_at[0] >= state_step
    (last,) = checkpoint.steps(tmp_path / "run" / "checkpoints").values()
    with checkpoint.Checkpoint(last) as opened:
        assert opened.step == steps
        if mode == "async":  # each example was used once; in backup, late gradients are dropped
            assert opened.attributes["/"]["position"] == 12 * steps


@pytest.mark.full
def test_restarts_that_fail_before_training_are_counted(openmpi: Mpi, tmp_path: Path) -> None:
    job = tmp_path / "job.py"
    job.write_text(
        f"""import os, runpy, signal
def job():
    if os.environ["MPITRAIN_RESTART_COUNT"] in ("1", "2"):
        os.kill(os.getpid(), signal.SIGKILL)
    return runpy.run_path({str(SMALL)!r})["job"]()
"""
    )
    with KilledRun(openmpi, 2, tmp_path / "run", job, "--train-steps", str(STEPS)) as killed:
        killed.wait_for_state()
        killed.kill("worker", 1)
        killed.end()
    (restart,) = read_run(tmp_path / "run").restarts
    assert restart.attempts == 3 and restart.seconds > 1  # the pause before the third attempt


@pytest.mark.full
def test_fork_servers_start_the_first_ranks_and_those_of_restarts(mpi: Mpi, tmp_path: Path) -> None:
    """The server of the first ranks is killed with them, and so is the server of the first restart."""
    with KilledRun(mpi, 2, tmp_path / "run", SMALL, "--train-steps", "100000000", "--max-restarts", "3") as killed:
        pids: set[int] = set()
        for is_forked in (True, True, False):
            ranks = killed.wait_for_ranks(other_than=pids)
            pids |= {rank.pid for rank in ranks}
            server = parent_of(ranks[1].reaper)
            assert (Path(f"/proc/{server}/comm").read_bytes().strip() == fork_server.NAME) == is_forked
            assert os.sched_getscheduler(ranks[1].pid) == os.SCHED_OTHER
            assert Path(f"/proc/{ranks[1].pid}/comm").read_bytes().strip() != fork_server.NAME
            os.kill(server if is_forked else ranks[1].pid, signal.SIGKILL)
        killed.wait_for_ranks(other_than=pids)
        killed.process.send_signal(signal.SIGINT)
        assert killed.process.wait(timeout=limit(40)) == os.EX_TEMPFAIL
        killed.assert_nothing_is_left()


@pytest.mark.full
@pytest.mark.parametrize("sets", [False, True])
def test_restarted_ranks_find_what_torch_imports_late(
    openmpi: Mpi, sets: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless the job sets a variable that torch reads when it is imported."""
    job, found, marker = tmp_path / "job.py", tmp_path / "found", tmp_path / "marker"
    (tmp_path / "last_import.py").write_text(f"open({str(marker)!r}, 'w').close()")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    job.write_text(
        f"""import dataclasses, os, runpy, sys, time, mpitrain
class Wait(mpitrain.Hook):
    def after_step(self, loop):
        time.sleep(0.01)  # modules are imported at low priority
def job():
    if {sets}:
        os.environ["TORCHDYNAMO_SUPPRESS_ERRORS"] = "1"
    with open({str(found)!r}, "a") as file:
        print(os.getpid(), os.environ.get("MPITRAIN_RESTART_COUNT"), "torch._dynamo" in sys.modules, file=file)
    import torch
    torch.optim.SGD([torch.zeros(1)], 0.1)
    return dataclasses.replace(runpy.run_path({str(SMALL)!r})["job"](), hooks=[Wait()])
"""
    )
    with KilledRun(openmpi, 2, tmp_path / "run", job, "--train-steps", "100000000") as killed:
        killed.wait_for_state()
        pids = {rank.pid for rank in killed.wait_for_ranks()}
        import_in_server(str(killed.run_dir), "last_import")
        wait_until(marker.exists, lambda: killed.output, TIMEOUT_S, process=killed.process)
        killed.kill("worker", 1)
        killed.wait_for_ranks(other_than=pids)
    lines = [line.split() for line in reversed(found.read_text().splitlines())]
    first = {pid: (count, is_imported) for pid, count, is_imported in lines}  # of the calls in a process
    assert {("0", "False"), ("1", str(not sets))} == {each for each in first.values() if each[0] != "None"}


def test_the_same_command_continues_after_all_processes_were_killed(openmpi: Mpi, undisturbed, tmp_path: Path) -> None:
    run_dir = tmp_path / "killed"
    with KilledRun(openmpi, 2, run_dir, SMALL, *FLAGS) as killed:
        step = killed.wait_for_state()
        os.kill(killed.process.pid, signal.SIGKILL)
        killed.process.wait(timeout=limit(20))
    assert newest_state(str(run_dir)) is not None
    with KilledRun(openmpi, 2, run_dir, SMALL, *FLAGS) as again:
        again.end()
        assert len(again.resumed_at) == 1 and again.resumed_at[0] >= step
    assert_same_bits(final(run_dir), undisturbed(2))


@pytest.mark.full
def test_states_are_not_used_where_the_user_asks_for_something_else(openmpi: Mpi, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    for flags in (("--resume", "never"), ("--recover", "checkpoint")):
        _kill_all(openmpi, run_dir)
        with KilledRun(openmpi, 1, run_dir, SMALL, "--train-steps", "5", "--keep", "0", *flags) as again:
            again.end()
            assert not again.resumed_at
        shutil.rmtree(run_dir / "checkpoints")


def test_a_state_of_another_model_is_refused_and_saved(openmpi: Mpi, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    _kill_all(openmpi, run_dir)
    kept = newest_state(str(run_dir))
    assert kept is not None
    with KilledRun(openmpi, 1, run_dir, SMALL, "--train-steps", "5", "--hidden-units", "10") as again:
        assert again.process.wait(timeout=limit(60)) == 2
        again.assert_nothing_is_left()
    (saved,) = checkpoint.steps(run_dir / "checkpoints")
    assert saved >= kept.step  # a rank whose launcher was killed may keep another state before it ends


def test_a_state_is_saved_if_there_is_no_restart_left(openmpi: Mpi, tmp_path: Path) -> None:
    run_dir, flags = tmp_path / "run", ("--train-steps", "100000000", "--max-restarts", "1")
    with KilledRun(openmpi, 2, run_dir, SMALL, *flags) as killed:
        for _ in range(2):
            step = killed.wait_for_state()
            killed.kill("worker", 1)
        assert killed.process.wait(timeout=limit(60)) == 1
        killed.assert_nothing_is_left()
    (saved,) = checkpoint.steps(run_dir / "checkpoints").values()
    checkpoint.verify(saved)
    assert max(checkpoint.steps(run_dir / "checkpoints")) >= step


def _kill_all(mpi: Mpi, run_dir: Path) -> None:
    """Start a run and kill its supervisor, so that the run ends and its state in memory is left."""
    with KilledRun(mpi, 1, run_dir, SMALL, "--train-steps", "100000000") as killed:
        killed.wait_for_state()
        os.kill(killed.process.pid, signal.SIGKILL)
        killed.process.wait(timeout=limit(20))
    assert state_folder.existing(str(run_dir))


def test_bad_flags(openmpi: Mpi) -> None:
    for words in (["--recover", "memory"], ["--recover", "disk", "--max-restarts", "1"]):
        done = run([str(openmpi.python), "-m", "mpitrain", "run", *words, str(JOBS / "small.py")])
        assert done.returncode == 2
        assert "--recover" in done.stderr
    words = ["--recover", "memory", "--max-restarts", "1", "--", "true"]
    done = run([str(openmpi.python), "-m", "mpitrain", "run", *words])
    assert done.returncode == 2
    assert "--recover" in one_line(done.stderr)


def test_a_live_run_continues_on_other_ranks(openmpi: Mpi, tmp_path: Path) -> None:
    def scale(*words: str) -> subprocess.CompletedProcess[str]:
        return run([str(openmpi.python), "-m", "mpitrain", "scale", str(tmp_path / "run"), *words])

    with KilledRun(openmpi, 1, tmp_path / "run", SMALL, "--train-steps", "100000000") as live:
        pids: set[int] = set()
        for n, others in ((1, 3), (3, 2), (2, None)):
            ranks = live.wait_for_ranks(other_than=pids)
            assert len(ranks) == n
            pids |= {rank.pid for rank in ranks}
            if others is not None:
                assert scale("-n", str(others)).returncode == 0
        assert scale().returncode == 2
        refused = scale("--hosts", "no-such-host.invalid:1")
        assert refused.returncode == 2
        assert "no-such-host.invalid" in one_line(refused.stderr)
        live.process.send_signal(signal.SIGINT)
        assert live.process.wait(timeout=limit(60)) == os.EX_TEMPFAIL
        assert len(live.resumed_at) == 2 and 0 < live.resumed_at[0] < live.resumed_at[1]
    assert scale("-n", "2").returncode == 2
