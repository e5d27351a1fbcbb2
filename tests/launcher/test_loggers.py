"""``--logger``: the records of a run in Weights & Biases, offline, and in MLflow, in local files."""

from __future__ import annotations

import importlib.util
import json
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..support.launch import JOBS, Mpi, missing, one_line, run

JOB = JOBS / "measured.py"


def train(mpi: Mpi, folder: Path, env: dict[str, str], *flags: str) -> str:
    """Train on two ranks; return the only line of mpitrain's error, empty if there is none."""
    command = [str(mpi.python), "-m", "mpitrain", "run", "-n", "2", str(JOB), "--run-dir", str(folder), *flags]
    done = run(command, timeout=100, env=env)
    assert done.returncode in (0, 2), done.stdout + done.stderr
    return one_line(done.stderr) if done.returncode else ""


def recorded(folder: Path, name: str) -> list[tuple[int, float]]:
    """Return the steps and values of ``name`` in ``metrics.jsonl``."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line[name]) for line in lines if name in line]


def records_of_wandb(path: Path) -> Iterator[bytes]:
    """Yield the records of an offline run's file: after a header of 7 bytes, blocks in the log format of LevelDB."""
    content, position, record = path.read_bytes(), 7, b""
    while position + 7 <= len(content):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        _, size, kind = struct.unpack("<IHB", content[position : position + 7])
        record += content[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (1, 4):  # a whole record, or its last part
            yield record
            record = b""


def test_wandb(openmpi: Mpi, tmp_path: Path) -> None:
    if importlib.util.find_spec("wandb") is None:
        missing("wandb; 'make env' installs it")
    from wandb.proto import wandb_internal_pb2

    folder, flags = tmp_path / "run", ("--logger", "wandb", "--validate-steps", "10")
    for steps in ("20", "40"):  # the second run continues the first one
        assert train(openmpi, folder, {"WANDB_MODE": "offline"}, *flags, "--train-steps", steps) == ""
    values, ids, exits = {}, set(), []
    for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        for content in records_of_wandb(path):
            record = wandb_internal_pb2.Record.FromString(content)
            items = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            if "validation_far" in items:
                values[items["_step"]] = items["validation_far"]
            ids |= {record.run.run_id} - {""}
            exits += [record.exit.exit_code] if record.HasField("exit") else []
    assert sorted(values.items()) == recorded(folder, "validation_far")
    assert len(ids) == 1 and exits == [0, 0]


def test_mlflow(openmpi: Mpi, tmp_path: Path) -> None:
    if importlib.util.find_spec("mlflow") is None:
        missing("mlflow; 'make env' installs it")
    import mlflow

    folder, store, flags = tmp_path / "run", f"file://{tmp_path}/store", ("--logger", "mlflow", "--log-steps", "5")
    env = {"MLFLOW_TRACKING_URI": store, "MLFLOW_ALLOW_FILE_STORE": "true"}
    for steps in ("20", "40"):
        assert train(openmpi, folder, env, *flags, "--validate-steps", "10", "--train-steps", steps) == ""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        client = mlflow.MlflowClient(store)
        (stored,) = client.search_runs(["0"])
        for name in ("loss", "validation_far"):
            history = client.get_metric_history(stored.info.run_id, name)
            assert sorted((metric.step, metric.value) for metric in history) == recorded(folder, name)
    assert stored.info.status == "FINISHED" and stored.info.run_name == "run"
    assert stored.data.params["run.mode"] == "sync"


def test_a_missing_package_is_one_line(mpich: Mpi, tmp_path: Path) -> None:
    assert "mpitrain[wandb]" in train(mpich, tmp_path / "run", {}, "--logger", "wandb")  # not installed with MPICH
    assert not (tmp_path / "run").exists()


def test_a_service_that_cannot_be_used_is_one_line(openmpi: Mpi, tmp_path: Path) -> None:
    (tmp_path / "wandb.py").write_text("raise ImportError('not here')")
    assert "not here" in train(openmpi, tmp_path / "run", {"PYTHONPATH": str(tmp_path)}, "--logger", "wandb")
    assert not (tmp_path / "run" / "checkpoints").exists()
