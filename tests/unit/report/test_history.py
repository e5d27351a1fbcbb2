"""Run directories in any state can be read: half written, resumed, or of another program."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mpitrain.errors import RecordError
from mpitrain.monitor.metrics import MetricsFile, last_step, read_lines
from mpitrain.report.history import Run, Tail, open_run, read_run

from ...support.run_directories import make_run


def write(path: Path, *lines: object) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def steps(run: Run, name: str = "loss") -> list[int]:
    return [int(step) for step in run.series(name).steps]


def test_what_was_written_is_read(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics.write(10, 0.5, {"loss": 2.0, "learning_rate": 0.1})
    metrics.write(20, 1.0, {"loss": float("nan"), "workers": [{"worker": 0, "staleness_mean": float("inf")}]})
    metrics.close()
    run = read_run(tmp_path)
    loss = run.series("loss")
    assert steps(run) == [10, 20]
    assert loss.times.tolist() == [0.5, 1.0]
    assert loss.values[0] == 2.0 and loss.last != loss.last
    assert run.newest("workers") == [{"worker": 0, "staleness_mean": None}]
    assert (run.step, run.seconds) == (20, 1.0)


@pytest.mark.parametrize("torn", ['{"step": 30, "lo', '{"step": 30, "loss": 1.0}', "", "\0\0\0"])
def test_a_line_counts_when_it_is_whole(tmp_path: Path, torn: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 10, "loss": 3.0}\n{"step": 20, "loss": 2.0}\n' + torn)
    assert steps(read_run(tmp_path)) == [10, 20]


def test_lines_that_are_none_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'\xff\xfe\n[1]\n{"loss": 1}\n7\n{"step": "x"}\n{"step": 5, "loss": 1.5}\n')
    assert steps(read_run(tmp_path)) == [5]


def test_of_a_resumed_run_the_newer_lines_hold(tmp_path: Path) -> None:
    write(
        tmp_path / "metrics.jsonl",
        *({"step": s, "loss": 1.0} for s in (10, 20, 30, 40)),
        {"step": 20, "validation_loss": 1.0},
        {"step": 40, "validation_loss": 1.0},
        {"step": 25, "resumed": 25},
        {"step": 30, "loss": 2.0},
    )
    run = read_run(tmp_path)
    assert steps(run) == [10, 20, 30]
    assert run.series("loss").values.tolist() == [1.0, 1.0, 2.0]
    assert steps(run, "validation_loss") == [20]
    assert run.step == 30


def test_validation_beside_training_comes_late_and_replaces_nothing(tmp_path: Path) -> None:
    lines = [{"step": 10, "loss": 1.0}, {"step": 20, "loss": 0.5}, {"step": 15, "validation_loss": 0.7}]
    write(tmp_path / "metrics.jsonl", *lines)
    run = read_run(tmp_path)
    assert steps(run) == [10, 20]
    assert steps(run, "validation_loss") == [15]
    assert run.step == 20


def test_measured_twice_at_a_step_the_newer_holds(tmp_path: Path) -> None:
    write(tmp_path / "metrics.jsonl", {"step": 10, "loss": 1.0}, {"step": 10, "accuracy": 1}, {"step": 10, "loss": 2.0})
    run = read_run(tmp_path)
    assert run.series("loss").values.tolist() == [2.0]
    assert len(run.series("accuracy")) == 1


def test_time_continues_after_a_resume_and_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = MetricsFile(path)
    first.write(10, 4.0, {"loss": 1.0})
    first.close()
    with path.open("a") as file:
        file.write('{"step": 20, "time_s"')
    second = MetricsFile(path)
    second.write(20, 1.5, {"loss": 0.5})
    second.close()
    assert [json.loads(line)["time_s"] for line in path.read_text().splitlines()] == [4.0, 5.5]


def test_the_tail_is_what_came_since(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = Tail(path)
    assert tail.read() == []
    write(path, {"step": 1})
    assert tail.read() == [{"step": 1}]
    with path.open("a") as file:
        file.write('{"step": 2}\n{"st')
    assert tail.read() == [{"step": 2}]
    with path.open("a") as file:
        file.write('ep": 3}\n')
    assert tail.read() == [{"step": 3}]
    write(path, {"step": 1})  # shorter: another run has begun
    assert tail.read() == [{"step": 1}]


def test_options_are_read(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "a", mode="async"))
    assert (run.job, run.option("mode"), run.option("train_steps"), run.name) == ("mnist_mlp", "async", 1000, "a")
    assert len(run.newest("workers")) == 2


def test_what_is_no_run_is_reported(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="none: "):
        open_run(tmp_path / "none")
    with pytest.raises(RecordError, match=f"{tmp_path} .*metrics"):
        open_run(tmp_path)
    (tmp_path / "config.toml").write_text("not = = toml")
    with pytest.raises(RecordError, match=r"config\.toml cannot be read"):
        open_run(tmp_path)


def test_the_end_of_a_file_begins_with_a_complete_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert last_step(path) == 0 and read_lines(path, 100) == []
    path.write_text("".join(f'{{"step": {step}, "loss": {{"a": 1}}}}\n' for step in range(100)))
    assert [line["step"] for line in read_lines(path, 80)] == [98, 99]
    assert len(read_lines(path, 1 << 20)) == len(read_lines(path)) == 100 and last_step(path) == 99
