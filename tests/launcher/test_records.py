"""Files of runs besides metrics and checkpoints: status, logs, events, traces; and the commands that show them."""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tensorboard.backend.event_processing import event_accumulator

from mpitrain.cli.main import main
from mpitrain.core.openblas import CORE_TYPE
from mpitrain.monitor.heartbeat import read, states
from mpitrain.monitor.trace import KINDS
from mpitrain.report.history import read_run
from mpitrain.report.time_shares import GROUPS, read_shares

from ..support.launch import JOBS, Mpi
from ..support.results import assert_same_bits, final
from ..support.waiting import limit, wait_until
from ..support.world.controller import World

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SMALL = JOBS / "small.py"


def lines_of(run_dir: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def has_losses(run_dir: Path) -> bool:
    return (run_dir / "metrics.jsonl").exists() and any("loss" in line for line in lines_of(run_dir))


def events_of(run_dir: Path):
    found = event_accumulator.EventAccumulator(
        str(run_dir / "tensorboard"), size_guidance={"scalars": 0, "histograms": 0}
    )
    found.Reload()
    return found


@pytest.mark.quick
def test_tensorboard_events_match_the_metrics(world: World, tmp_path: Path) -> None:
    flags = ["--log-steps", "10", "--validate-steps", "50", "--histogram-steps", "50", "--run-dir", tmp_path]
    world.train(2, SMALL, *flags)
    events = events_of(tmp_path)
    for tag, name in (("loss/training", "loss"), ("accuracy/validation", "validation_accuracy")):
        expected = [(line["step"], pytest.approx(line[name])) for line in lines_of(tmp_path) if name in line]
        assert [(event.step, event.value) for event in events.Scalars(tag)] == expected
        assert expected
    histograms = events.Tags()["histograms"]
    assert {name.split("/")[0] for name in histograms} == {"parameters", "gradients"}
    assert all([event.step for event in events.Histograms(name)] == [50, 100] for name in histograms)


def test_histograms_change_nothing_that_is_trained(world: World, tmp_path: Path) -> None:
    world.train(2, SMALL, "--run-dir", tmp_path / "a", "--no-tensorboard")
    world.train(2, SMALL, "--run-dir", tmp_path / "b", "--histogram-steps", "7", "--trace")
    assert_same_bits(final(tmp_path / "a"), final(tmp_path / "b"))
    assert not (tmp_path / "a" / "tensorboard").exists()
    assert not (tmp_path / "a" / "trace.json").exists()


@pytest.mark.quick
def test_status_logs_and_trace_under_every_mpi(mpi: Mpi, tmp_path: Path) -> None:
    mpi.train(3, SMALL, "--run-dir", tmp_path, "--trace")
    assert read_shares(tmp_path) is not None
    status = read(tmp_path)
    assert status is not None
    assert (status.state, status.step, status.train_steps, status.ranks) == ("finished", 100, 100, "3 workers")
    logs = sorted((tmp_path / "logs").iterdir())
    assert [path.name for path in logs] == [f"rank-{rank}.log" for rank in range(3)]
    for rank, path in enumerate(logs):
        assert f"rank {rank} of 3" in path.read_text().splitlines()[0]


def test_a_ranks_warnings_are_in_its_log_and_the_chiefs_are_printed(world: World, job, tmp_path: Path) -> None:
    path = job("""
import logging, warnings
from mpitrain import Hook, Job, data, nn, optim

class Warn(Hook):
    def begin(self, loop):
        warnings.warn(f"warned by {loop.cluster.rank}")
        logging.getLogger("user").info("logged by %d", loop.cluster.rank)

def job() -> Job:
    digits = data.mnist(None)
    return Job(
        model=nn.Dense(digits.features, 10), loss=nn.SoftmaxCrossEntropy(), optimizer=optim.sgd(0.1),
        train=digits.train, batch_size=10, train_steps=3, hooks=[Warn()],
    )
""")
    done = world.train(2, path, "--run-dir", tmp_path / "run")
    for rank in range(2):
        text = (tmp_path / "run" / "logs" / f"rank-{rank}.log").read_text()
        assert f"warned by {rank}" in text and f"logged by {rank}" in text
        assert f"warned by {1 - rank}" not in text
    assert "warned by 0" in done.stderr
    assert "warned by 1" not in done.stderr


def test_an_unforeseen_exception_is_in_the_ranks_log(openmpi: Mpi, tmp_path: Path) -> None:
    words = ["-m", "mpitrain", "train", JOBS / "raising.py", "--where", "hook", "--run-dir", tmp_path]
    done = openmpi.run(2, *words)
    assert done.returncode == 1
    text = (tmp_path / "logs" / "rank-1.log").read_text()
    assert "ValueError: on purpose" in text and "Traceback" in text
    assert done.stderr.count("Traceback") == 1
    # mpirun kills the chief, and may exit before the chief has ended.
    wait_until(lambda: states([tmp_path])[tmp_path] in ("died", "failed"), lambda: states([tmp_path]), 10)


def test_a_mistake_that_is_found_late_is_a_line_in_the_log(world: World, tmp_path: Path) -> None:
    message = world.refusal(2, JOBS / "diverging.py", "--run-dir", tmp_path).removeprefix("mpitrain: ")
    text = (tmp_path / "logs" / "rank-0.log").read_text()
    assert message in text and "Traceback" not in text
    assert states([tmp_path])[tmp_path] == "failed"


@pytest.mark.quick
def test_time_and_events_go_on_after_a_resume(openmpi: Mpi, world: World, tmp_path: Path) -> None:
    flags = ["--log-steps", "10", "--run-dir", tmp_path]
    world.train(2, SMALL, *flags, "--train-steps", "50")
    before = lines_of(tmp_path)[-1]["time_s"]
    openmpi.train(2, SMALL, *flags)  # an event file is named after its process and second
    lines = lines_of(tmp_path)
    assert [line["time_s"] for line in lines] == sorted(line["time_s"] for line in lines)
    assert lines[-1]["time_s"] > before > 0
    assert [line["step"] for line in lines if "resumed" in line] == [50]
    assert read_run(tmp_path).series("loss").steps.tolist() == list(range(10, 101, 10))
    assert [event.step for event in events_of(tmp_path).Scalars("loss/training")] == list(range(10, 101, 10))


def test_the_versions_of_everything(world: World, tmp_path: Path) -> None:
    world.train(1, SMALL, "--train-steps", "1", "--run-dir", tmp_path)
    versions = tomllib.loads((tmp_path / "config.toml").read_text())["versions"]
    assert {"python", "system", "mpitrain", "mpi4py", "numpy", "numba", "h5py", "hdf5", "mpi"} <= versions.keys()
    assert any(name.startswith("blas") for name in versions)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the kernels are those of x86 CPUs")
def test_a_resumed_run_keeps_the_kernels_of_openblas(openmpi: Mpi, tmp_path: Path) -> None:
    environ = {name: value for name, value in os.environ.items() if name != CORE_TYPE}  # pytest's processes inherit it

    def train(steps: int, **env: str) -> str:
        words = [sys.executable, "-m", "mpitrain", "run", "-n", "1", SMALL, "--run-dir", tmp_path]
        words += ["--train-steps", str(steps)]
        return subprocess.run(words, env=environ | env, timeout=60, check=True, capture_output=True, text=True).stdout

    begun, resumed = train(2, OPENBLAS_CORETYPE="Sandybridge"), train(4)
    assert kernels_of(tmp_path) == "Sandybridge"
    changed = train(6, OPENBLAS_CORETYPE="Haswell")
    assert kernels_of(tmp_path) == "Haswell"
    assert ["Sandybridge -> Haswell" in output for output in (begun, resumed, changed)] == [False, False, True]


def kernels_of(run_dir: Path) -> str:
    return tomllib.loads((run_dir / "config.toml").read_text())["versions"]["blas_openblas"].split()[1]


MODES = {
    "sync": (2, ["--mode", "sync"]),
    "sync, no shared memory": (3, ["--mode", "sync", "--no-shared-memory"]),
    "local": (2, ["--mode", "local"]),
    "ssp, server": (3, ["--mode", "ssp", "--ps", "1"]),
    "backup, far servers": (4, ["--mode", "backup", "--ps", "1", "--no-shared-memory"]),
}


@pytest.mark.parametrize("mode", MODES)
def test_a_trace_has_the_time_of_every_rank(world: World, mode: str, tmp_path: Path) -> None:
    n, flags = MODES[mode]
    flags = [*flags, "--no-normalize", "--validate-steps", "40"]
    world.train(n, SMALL, *flags, "--trace", "--trace-steps", "20", "--run-dir", tmp_path)
    content = json.loads((tmp_path / "trace.json").read_text())
    spans = [event for event in content["traceEvents"] if event["ph"] == "X"]
    assert {span["pid"] for span in spans} == set(range(n))
    assert {span["name"] for span in spans} <= set(KINDS)
    threads = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in content["traceEvents"]
        if event["name"] == "thread_name"
    }
    background = {threads[span["pid"], span["tid"]]: span["name"] for span in spans if span["tid"] > 0}
    assert background == {"saving": "save"}
    workers = [entry for entry in content["mpitrain"]["ranks"] if entry["role"].startswith("worker")]
    assert sum(entry["steps"] for entry in workers) >= 100
    for entry in workers:
        own = [span for span in spans if span["pid"] == entry["rank"]]
        steps = [span for span in own if span["name"] == "step"]
        assert len(steps) == min(20, entry["steps"])  # fewer if a worker started late
        assert not steps or {"load", "forward", "backward"} <= {span["name"] for span in own}
        # The parts of a step are inside its span, and do not take longer than the step.
        for step in steps:
            inside = [s for s in own if s["name"] in ("load", "forward", "backward") and step["ts"] <= s["ts"]]
            inside = [s for s in inside if s["ts"] < step["ts"] + step["dur"]]
            assert sum(s["dur"] for s in inside) <= step["dur"] + 0.01
        assert all(seconds >= 0 for seconds in entry["seconds"].values())
    shares = read_shares(tmp_path)
    assert shares is not None
    assert sum(shares.fraction(group) for group in GROUPS) == pytest.approx(1)
    assert main(["report", str(tmp_path)]) == 0
    assert "% compute" in (tmp_path / "report.html").read_text()


def test_whom_the_ranks_waited_for(world: World, job, tmp_path: Path) -> None:
    path = job("""
import time
from mpitrain import Hook, Job, data, nn, optim

class Late(Hook):
    def after_step(self, loop):
        if loop.cluster.rank == 1:
            time.sleep(0.01)

def job() -> Job:
    digits = data.mnist(None)
    return Job(
        model=nn.Dense(digits.features, 10), loss=nn.SoftmaxCrossEntropy(), optimizer=optim.sgd(0.1),
        train=digits.train, batch_size=10, train_steps=40, hooks=[Late()],
    )
""")
    world.train(2, path, "--trace", "--validate-steps", "0", "--run-dir", tmp_path / "run")
    shares = read_shares(tmp_path / "run")
    assert shares is not None
    rank, share = shares.waited_for[0]
    assert rank.rank == 1
    assert share > 0.5


def test_a_run_is_watched_to_its_end_and_seen_to_die(openmpi: Mpi, tmp_path: Path) -> None:
    words = [str(openmpi.python), "-m", "mpitrain", "train", str(JOBS / "small.py"), "--run-dir", str(tmp_path)]
    words += ["--train-steps", "100000000", "--log-steps", "10"]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL) as run:
        try:
            wait_until(lambda: has_losses(tmp_path), "losses", process=run)
            assert states([tmp_path])[tmp_path] == "running"
            watch = [str(openmpi.python), "-m", "mpitrain", "watch", str(tmp_path), "--interval", "0.1"]
            with subprocess.Popen(watch, stdout=subprocess.PIPE, text=True, env={**os.environ, "COLUMNS": "80"}) as see:
                time.sleep(1)  # it looks every 0.1 s, and prints at its end only, because this is no terminal
                assert see.poll() is None
                run.send_signal(signal.SIGKILL)
                run.wait()
                out, _ = see.communicate(timeout=limit(30))
        finally:
            run.kill()
    assert ": died" in out
    assert "loss" in out
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--histogram-steps", "5", "--no-tensorboard"], "--histogram-steps 5"),
        (["--trace", "--trace-steps", "0"], "--trace-steps is 0"),
    ],
)
def test_mistakes(world: World, flags: list[str], expected: str, tmp_path: Path) -> None:
    assert expected in world.refusal(2, SMALL, *flags, "--run-dir", tmp_path)


def test_logs_that_cannot_be_written_are_reported_in_a_line(world: World, tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file, where a folder is to be")
    assert f"{tmp_path / 'logs'}" in world.refusal(2, SMALL, "--run-dir", tmp_path)
