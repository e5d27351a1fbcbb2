"""Learners (``--join``): runs that train one model through a folder, whoever starts, dies, sleeps or ends."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from mpitrain import checkpoint, load
from mpitrain.monitor import heartbeat
from mpitrain.monitor.metrics import read_lines
from mpitrain.process import rank_status
from mpitrain.report.history import read_run
from mpitrain.strategy.learners.lease import LEASE_S
from mpitrain.strategy.learners.ledger import Ledger
from mpitrain.strategy.learners.store import Folder, Register

from ..support.clock import with_wrong_clock
from ..support.launch import JOBS, LAUNCHER_ENVIRONMENT, ROOT, Mpi, missing, one_line, run
from ..support.waiting import limit, wait_until

SLOW, MNIST = JOBS / "slow.py", ROOT / "jobs" / "mnist_mlp.py"


def start(mpi: Mpi, folder: Path, n: int, *words: object, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    command = [mpi.python, "-m", "mpitrain", "run", "-n", n, "--join", folder, *words]
    return subprocess.Popen(
        list(map(str, command)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env=env,
    )


def end(process: subprocess.Popen[str], status: int = 0) -> str:
    """Wait for the end of a learner, and return its output."""
    output, _ = process.communicate(timeout=limit(90))
    assert process.returncode == status, output
    return output


@contextmanager
def learners(
    mpi: Mpi, folder: Path, *ranks: int, words: tuple[object, ...], env: dict[str, str] | None = None
) -> Iterator[list[subprocess.Popen[str]]]:
    """Learners of a run, all of which have trained some steps; the last one has this environment."""
    last = len(ranks) - 1
    processes = [
        start(mpi, folder, n, "--run-dir", folder / "learners" / str(k), *words, env=env if k == last else None)
        for k, n in enumerate(ranks)
    ]
    try:
        for number in range(len(ranks)):
            wait_until(lambda number=number: state(folder, number).get("examples", 0) > 100, lambda: states(folder))
        yield processes
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def kill(process: subprocess.Popen[str], folder: Path, name: object) -> None:
    """Kill all processes of a learner; a rank whose launcher is killed first would end as if it was stopped."""
    os.kill(process.pid, signal.SIGSTOP)  # else it would start the rank again
    for status in rank_status.read(folder / "learners" / str(name)):
        os.kill(status.pid, signal.SIGKILL)
    os.killpg(process.pid, signal.SIGKILL)


def state(folder: Path, name: object) -> dict[str, int]:
    """Return what a learner says of itself."""
    path = folder / "exchange" / f"state.{name}"
    return json.loads(path.read_bytes()) if path.exists() else {}


def states(folder: Path) -> list[dict[str, int]]:
    return [json.loads(path.read_bytes()) for path in sorted((folder / "exchange").glob("state.*"))]


def waits(folder: Path, name: object) -> bool:
    """Return whether a learner has trained what it has claimed, and nothing more can be claimed now."""
    book = ledger(folder)
    member = book.members[str(name)]
    mine = member.merged + sum(hi - lo for lo, hi in member.held)
    return book.is_given_out and state(folder, name)["examples"] == mine


def ledger(folder: Path) -> Ledger:
    return Ledger.parse(Register(Folder(folder / "exchange"), "ledger", 64).read().data)


def validations(folder: Path) -> list[float]:
    """Return the losses of the validations of the common model."""
    lines = read_lines(folder / "metrics.jsonl")
    assert [line["time_s"] for line in lines] == sorted(line["time_s"] for line in lines)
    return [line["validation_loss"] for line in lines if "validation_loss" in line]


def position(folder: Path) -> int:
    """Return the number of examples that the newest common checkpoint contains."""
    with checkpoint.Checkpoint(checkpoint.find(folder)[0]) as opened:
        return int(opened.attributes["/"]["position"])


def test_learners_of_other_sizes_train_one_model(openmpi: Mpi, mpich: Mpi, tmp_path: Path) -> None:
    words = "--train-steps", 1500, "--validate-steps", 200, "--stop-metric", "loss", "--keep-best"
    folder = tmp_path / "run"
    first = start(openmpi, folder, 2, MNIST, *words)
    second = start(mpich, folder, 1, MNIST, *words, "--batch-size", 50)
    end(first)
    end(second)
    book = ledger(folder)
    assert book.is_given_out and not book.living and not book.free
    assert position(folder) >= book.total and book.total == 1500 * book.unit
    assert heartbeat.read(folder).state == "finished"  # type: ignore[union-attr]
    done = run([str(openmpi.python), "-m", "mpitrain", "evaluate", str(folder), "--json"])
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["validation_accuracy"] > 0.95
    assert json.loads(done.stdout)["validation_loss"] == pytest.approx(validations(folder)[-1], rel=1e-5)
    assert np.isfinite(load(folder)(np.zeros((1, 64), np.float32))).all()
    best = checkpoint.best(folder / "checkpoints")
    assert best is not None and min(validations(folder)) == best.value
    done = run([str(openmpi.python), "-m", "mpitrain", "evaluate", str(folder / "best"), "--json"])
    assert json.loads(done.stdout)["validation_loss"] == pytest.approx(best.value, rel=1e-5)


def test_the_last_validation_measures_the_last_common_model(openmpi: Mpi, tmp_path: Path) -> None:
    """This run ends before its learner has exchanged anything."""
    end(start(openmpi, tmp_path, 2, MNIST, "--train-steps", 30))
    done = run([str(openmpi.python), "-m", "mpitrain", "evaluate", str(tmp_path), "--json"])
    measured = json.loads(done.stdout)["validation_loss"]
    for folder in (tmp_path, tmp_path / "learners" / "0"):
        last = [line for line in read_run(folder).lines if "validation_loss" in line][-1]
        assert last["step"] == 30 and last["validation_loss"] == pytest.approx(measured, rel=1e-4)
    assert read_run(tmp_path / "learners" / "0").newest("merged_contributions") == 1


def test_several_learners_begin_a_run_at_once(openmpi: Mpi, tmp_path: Path) -> None:
    processes = [start(openmpi, tmp_path, 1, MNIST, "--train-steps", 400) for _ in range(4)]
    for process in processes:
        end(process)
    assert len([*(tmp_path / "history").iterdir()]) == 1 and read_run(tmp_path).option("join")
    assert len(ledger(tmp_path).members) == 4 and ledger(tmp_path).is_given_out


@pytest.mark.parametrize("words", [("--train-steps", 100), ("--train-epochs", 1), ("--train-epochs", 9)])
def test_the_first_learner_sets_the_length_of_the_run(openmpi: Mpi, tmp_path: Path, words: tuple[object, ...]) -> None:
    end(start(openmpi, tmp_path, 1, MNIST, "--train-steps", 30))
    end(start(openmpi, tmp_path, 1, MNIST, *words, "--batch-size", 50))
    status = heartbeat.read(tmp_path / "learners" / "1")
    assert status is not None and (status.step, status.train_steps, status.state) == (60, 60, "finished")
    assert read_run(tmp_path / "learners" / "1").train_steps == 60 and position(tmp_path) == 3000


def test_a_learner_on_gpus_and_one_on_cpus_train_one_model(
    openmpi: Mpi, simulated: dict[str, str], tmp_path: Path
) -> None:
    words = MNIST, "--train-steps", 400, "--validate-steps", 100
    first = start(openmpi, tmp_path, 2, *words, "--device", "gpu", env={**os.environ, **simulated})
    second = start(openmpi, tmp_path, 1, *words)
    assert "; on GPUs" in end(first)
    end(second)
    book = ledger(tmp_path)
    assert book.is_given_out and not book.living and position(tmp_path) >= book.total
    offsets = []
    for name in book.members:  # the optimizer counts the learner's own updates, not the steps of all
        (newest,) = checkpoint.find(tmp_path / "learners" / name)[:1]
        with checkpoint.Checkpoint(newest) as opened:  # without an offset if it has ended before others had sent any
            offsets.append(opened.attributes.get("run/state/updates", {"offset": 0})["offset"])
    assert -400 < min(offsets) < 0 and max(offsets) <= 0
    done = run([str(openmpi.python), "-m", "mpitrain", "evaluate", str(tmp_path), "--json"])
    assert json.loads(done.stdout)["validation_accuracy"] > 0.9
    assert json.loads(done.stdout)["validation_loss"] == pytest.approx(validations(tmp_path)[-1], rel=1e-4)


@pytest.mark.parametrize("ahead_s", [0, 3600, -3600])
def test_a_killed_learner_continues(openmpi: Mpi, tmp_path: Path, ahead_s: int) -> None:
    """Also if the clocks of the hosts differ by an hour."""
    env = with_wrong_clock(tmp_path, ahead_s) if ahead_s else None
    words = SLOW, "--pause", "0.01", "--train-steps", 1200
    with learners(openmpi, tmp_path, 1, 2, words=words, env=env) as processes:
        killed = 0 if ledger(tmp_path).holder == "0" else 1
        kill(processes[killed], tmp_path, killed)
        wait_until(lambda: ledger(tmp_path).holder == str(1 - killed), "another learner merges")
        again = start(openmpi, tmp_path, 1, "--run-dir", tmp_path / "learners" / str(killed), *words)
        end(again)
        end(processes[1 - killed])
    book = ledger(tmp_path)
    assert book.is_given_out and not book.living and not book.free
    assert book.members[str(killed)].generation > 2 and position(tmp_path) >= book.total
    accounts = [read_run(tmp_path / "learners" / name).account for name in "01"]
    for name, account in zip("01", accounts, strict=True):
        assert account is not None and account.step == book.members[name].steps
        assert sum(account.seconds.values()) == pytest.approx(account.at - account.since, abs=0.01)


@pytest.mark.parametrize("holds", [True, False], ids=["holder", "other"])
def test_a_suspended_learner_continues(openmpi: Mpi, tmp_path: Path, holds: bool) -> None:
    """For longer than the lease, without a sign of life."""
    words = SLOW, "--pause", "0.01", "--train-steps", 3000
    with learners(openmpi, tmp_path, 1, 1, words=words) as processes:
        holder = int(ledger(tmp_path).holder)
        suspended, other = (holder, 1 - holder) if holds else (1 - holder, holder)
        ranks = [status.pid for status in rank_status.read(tmp_path / "learners" / str(suspended))]
        for pid in ranks:
            os.kill(pid, signal.SIGSTOP)
        beat = state(tmp_path, other)["beat"]
        wait_until(lambda: state(tmp_path, other)["beat"] > beat + LEASE_S, lambda: states(tmp_path))  # one each second
        wait_until(lambda: ledger(tmp_path).holder == str(other), "the other learner merges")
        for pid in ranks:
            os.kill(pid, signal.SIGCONT)
        for process in processes:
            end(process)
    book = ledger(tmp_path)
    assert book.is_given_out and not book.living and position(tmp_path) >= book.total


def test_a_learner_begins_with_the_next_step_of_the_run(openmpi: Mpi, tmp_path: Path) -> None:
    """Not with that of its first examples, which follow those that another learner has begun to train."""
    words = SLOW, "--pause", "0.01", "--train-steps", 2000, "--log-steps", 1
    with learners(openmpi, tmp_path, 1, words=words):
        (rank,) = rank_status.read(tmp_path / "learners" / "0")
        os.kill(rank.pid, signal.SIGSTOP)
        (rank,) = rank_status.read(tmp_path / "learners" / "0")
        metrics = tmp_path / "learners" / "1" / "metrics.jsonl"
        second = start(openmpi, tmp_path, 1, "--run-dir", metrics.parent, *words)
        try:
            wait_until(lambda: metrics.exists() and any("loss" in each for each in read_lines(metrics)), "a step")
            first = next(each["step"] for each in read_lines(metrics) if "loss" in each)
            assert ledger(tmp_path).members["1"].held[0][0] > 0 and first <= rank.step + 1
        finally:
            os.killpg(second.pid, signal.SIGKILL)


def test_a_learner_that_waits_for_the_examples_of_another_one_can_be_stopped(openmpi: Mpi, tmp_path: Path) -> None:
    words = SLOW, "--pause", "0.01", "--train-steps", 600
    with learners(openmpi, tmp_path, 1, 1, words=words) as processes:
        waiting = 0 if ledger(tmp_path).holder == "0" else 1
        kill(processes[1 - waiting], tmp_path, 1 - waiting)
        wait_until(lambda: waits(tmp_path, waiting), lambda: states(tmp_path))
        processes[waiting].send_signal(signal.SIGTERM)
        end(processes[waiting], os.EX_TEMPFAIL)
    killed = ledger(tmp_path).members[str(1 - waiting)]
    assert killed.process and killed.held  # it was not yet given up


def test_a_learner_that_is_stopped_saves_though_the_one_that_merges_has_just_died(openmpi: Mpi, tmp_path: Path) -> None:
    words = SLOW, "--pause", "0.01", "--train-steps", 3000
    with learners(openmpi, tmp_path, 1, 1, words=words) as processes:
        killed = int(ledger(tmp_path).holder)
        kill(processes[killed], tmp_path, killed)
        processes[1 - killed].send_signal(signal.SIGINT)
        end(processes[1 - killed], os.EX_TEMPFAIL)
    assert len(checkpoint.find(tmp_path / "learners" / str(1 - killed))) == 1 and position(tmp_path) > 0
    assert heartbeat.read(tmp_path).state == "stopped"  # type: ignore[union-attr]


def test_a_process_that_another_one_replaces_writes_no_more(openmpi: Mpi, tmp_path: Path) -> None:
    words, folder = (SLOW, "--pause", "0.01", "--train-steps", 3000), tmp_path / "learners" / "0"
    with learners(openmpi, tmp_path, 2, words=words) as (first,):
        command = [*openmpi.command(1), openmpi.python, "-m", "mpitrain", "train", "--join", tmp_path, *words]
        env = {**os.environ, **LAUNCHER_ENVIRONMENT}
        with subprocess.Popen([*map(str, command), "--run-dir", str(folder)], env=env) as second:
            try:
                assert end(first, 2).splitlines()[-1].startswith("mpitrain: another process trains this learner")
                pid = int(ledger(tmp_path).members["0"].process.split(":")[1])
                wait_until(lambda: heartbeat.read(folder).pid == pid, "its status", process=second)  # type: ignore[union-attr]
                assert heartbeat.read(folder).state == "running"  # type: ignore[union-attr]
                assert not [*folder.glob("checkpoints/*")]
                os.kill(pid, signal.SIGKILL)
            finally:
                second.kill()
    generation = ledger(tmp_path).members["0"].generation
    third = start(openmpi, tmp_path, 1, "--run-dir", folder, *words)
    try:
        wait_until(lambda: state(tmp_path, 0)["generation"] > generation, "another process", process=third)
    finally:
        os.killpg(third.pid, signal.SIGKILL)


def test_a_version_of_the_common_model_is_judged_once(openmpi: Mpi, tmp_path: Path) -> None:
    words = "--train-steps", 300, "--validate-steps", 5, "--stop-metric", "loss", "--patience", 2
    end(start(openmpi, tmp_path, 1, MNIST, *words))
    status = heartbeat.read(tmp_path / "learners" / "0")
    assert status is not None and (status.step, status.state) == (300, "finished")
    lines = read_lines(tmp_path / "learners" / "0" / "metrics.jsonl")
    steps = [line["step"] for line in lines if "validation_loss" in line]
    assert steps == sorted(set(steps)) and steps[0] == 0 and steps[-1] == 300


def test_a_run_that_one_learner_ends_early_ends_for_all(openmpi: Mpi, tmp_path: Path) -> None:
    words = SLOW, "--pause", "0.01", "--learning-rate", "0", "--train-steps", 9000
    with learners(openmpi, tmp_path, 1, words=words) as (other,):
        end(start(openmpi, tmp_path, 1, *words, "--validate-steps", 10, "--stop-metric", "loss", "--patience", 2))
        end(other)
    ends = [heartbeat.read(folder) for folder in (tmp_path, *sorted((tmp_path / "learners").iterdir()))]
    assert len(ends) == 3 and all(status is not None and status.state == "finished early" for status in ends)
    assert len({status.reason for status in ends if status is not None}) == 1
    before = ledger(tmp_path)
    assert "nothing to train: the run finished early" in end(start(openmpi, tmp_path, 1, *words))
    assert ledger(tmp_path) == before


def test_a_learner_that_ends_before_the_others_ends_at_the_step_that_is_known(openmpi: Mpi, tmp_path: Path) -> None:
    """Not at the last step of the run, which another one is still to train."""
    words = SLOW, "--train-steps", 600
    slow, folder = start(openmpi, tmp_path, 1, *words, "--pause", "5"), tmp_path / "learners" / "1"
    try:
        wait_until(lambda: state(tmp_path, 0), "a learner that has claimed its first range", process=slow)
        output = end(start(openmpi, tmp_path, 1, "--run-dir", folder, *words, "--pause", "0.01"))
        assert state(tmp_path, 0)["examples"] < 60 * ledger(tmp_path).unit  # it has 75
    finally:
        os.killpg(slow.pid, signal.SIGKILL)
    status, lines = heartbeat.read(folder), read_lines(folder / "metrics.jsonl")
    assert status is not None and 300 < status.step < 600 == status.train_steps and status.state == "finished"
    assert max(line["step"] for line in lines) == status.step
    (measured,) = (line["step"] for line in lines if "validation_loss" in line)
    assert f"at step {measured}: validation" in output and measured <= status.step


def test_a_learner_without_the_folder_saves_after_the_examples_of_a_run(openmpi: Mpi, tmp_path: Path) -> None:
    with learners(openmpi, tmp_path, 1, words=(SLOW, "--pause", "0.01", "--train-steps", 400)):
        (tmp_path / "exchange").rename(tmp_path / "elsewhere")
        saved = tmp_path / "learners" / "0" / "checkpoints"
        wait_until(lambda: [*saved.glob("*.h5")], "its own checkpoint")


def test_learners_train_on_while_the_disk_is_full(openmpi: Mpi, tmp_path: Path) -> None:
    """Everything that they write is on this disk."""
    if os.geteuid() != 0:
        missing("root, to mount a disk")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(tmp_path)], check=True)
    folder, words = tmp_path / "run", (SLOW, "--pause", "0.01", "--train-steps", 1500, "--save-steps", 100)
    try:
        with learners(openmpi, folder, 1, 1, words=words) as processes:
            seen: tuple[list[int], float] = [], 0.0

            def are_cut_off() -> bool:
                nonlocal seen
                with contextlib.suppress(OSError), (tmp_path / "full").open("ab", buffering=0) as file:
                    while True:
                        file.write(bytes(4096))
                beats = [state(folder, number)["beat"] for number in (0, 1)]
                seen = seen if beats == seen[0] else (beats, time.monotonic())
                return time.monotonic() - seen[1] > 3

            wait_until(are_cut_off, lambda: seen)
            (tmp_path / "full").unlink()
            for process in processes:
                end(process)
        book = ledger(folder)
        assert book.is_given_out and not book.living and position(folder) >= book.total
        assert [member.generation for member in book.members.values()] == [2, 2]  # nobody was given up
    finally:
        subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


def test_stop_ends_all_learners_and_they_resume(openmpi: Mpi, tmp_path: Path) -> None:
    words = SLOW, "--pause", "0.01", "--train-steps", 1500
    with learners(openmpi, tmp_path, 1, 1, words=words) as processes:
        done = run([str(openmpi.python), "-m", "mpitrain", "stop", str(tmp_path)])
        assert done.returncode == 0, done.stderr
        for number, process in enumerate(processes):
            end(process, os.EX_TEMPFAIL)
            assert heartbeat.read(tmp_path / "learners" / str(number)).state == "stopped"  # type: ignore[union-attr]
    book = ledger(tmp_path)
    assert not book.living and 0 < position(tmp_path) < book.total
    words = *words[:-1], 1  # the length of the run stays that of the first learner
    end(start(openmpi, tmp_path, 2, "--run-dir", tmp_path / "learners" / "1", *words))
    assert ledger(tmp_path).is_given_out and position(tmp_path) >= book.total


def test_stop_ends_a_run_of_another_host(openmpi: Mpi, tmp_path: Path) -> None:
    """The request is a file: here, the record of the launcher says that it is on another host."""
    words = [str(openmpi.python), "-m", "mpitrain", "run", "-n", "2", "--run-dir", str(tmp_path), str(SLOW)]
    with subprocess.Popen([*words, "--pause", "0.01", "--train-steps", "100000"], start_new_session=True) as process:
        try:
            wait_until(lambda: any(each.step > 5 for each in rank_status.read(tmp_path)), "steps", process=process)
            record = tmp_path / ".launcher.json"
            record.write_text(json.dumps(json.loads(record.read_text()) | {"host": "another"}))
            done = run([str(openmpi.python), "-m", "mpitrain", "stop", str(tmp_path)])
            assert done.returncode == 0 and process.wait(limit(30)) == os.EX_TEMPFAIL, done.stderr
        finally:
            process.kill()
    assert heartbeat.read(tmp_path).state == "stopped" and not (tmp_path / ".stop").exists()  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([SLOW, "--mode", "async"], "--join requires --mode sync"),
        ([JOBS / "small.py"], "moving averages"),
        ([SLOW, "--run-dir", "elsewhere"], "is not a learner of --join"),
        ([SLOW, "--join", "plain"], "has no folder exchange"),
        ([MNIST, "--seed", "3"], "differ in --seed"),
        ([MNIST, "--hidden-units", "30"], "differ in model"),
    ],
)
def test_what_does_not_work_is_refused(openmpi: Mpi, tmp_path: Path, words: list[object], expected: str) -> None:
    if words[0] == MNIST:
        end(start(openmpi, tmp_path / "run", 1, MNIST, "--train-steps", 2))
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "config.toml").touch()
    before = sorted(tmp_path.glob("*/learners/*"))
    command = [openmpi.python, "-m", "mpitrain", "run", "-n", 2, "--join", "run", *words, "--train-steps", 2]
    done = run(list(map(str, command)), cwd=tmp_path)
    assert done.returncode == 2 and expected in one_line(done.stderr), done.stderr
    assert sorted(tmp_path.glob("*/learners/*")) == before
