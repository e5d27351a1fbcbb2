"""``mpitrain runs``: one row for every run of a folder, in any state of its files."""

from __future__ import annotations

import json
import os
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from mpitrain.cli.main import main
from mpitrain.monitor.format import amount, duration, format_table
from mpitrain.monitor.goodput import Account, total
from mpitrain.monitor.heartbeat import BatchJob, ProcessHost, Status, write, write_submitted
from mpitrain.process.pid import pid_start
from mpitrain.report.page import collect, page
from mpitrain.report.runs import described_states
from mpitrain.report.watch import View

from ...support.run_directories import make_run


def table(capsys: pytest.CaptureFixture[str], *words: str | Path) -> dict[str, str]:
    assert main(["runs", *map(str, words)]) == 0
    return {line.split()[0]: line for line in capsys.readouterr().out.splitlines()[1:]}


def test_runs_at_any_depth_in_every_state(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here, me = ProcessHost.own(), os.getpid()
    for name, state, pid in (("a", "finished", 1), ("b/c", "running", me), ("d", "running", 1 << 22)):
        folder = make_run(tmp_path / name)
        write(folder, Status(state, 1000, 1000, "2 workers", 9, here, pid, pid_start(pid), 0.0))
    make_run(tmp_path / "old")
    (tmp_path / "empty").mkdir()
    rows = table(capsys, tmp_path)
    assert rows.keys() == {"a", "b/c", "d", "old"}
    assert [rows[name].split()[-3] for name in ("a", "b/c", "d", "old")] == ["finished", "running", "died", "unknown"]
    assert "mnist_mlp  sync  2 workers  1,000/1,000  accuracy 0.94" in rows["a"]


def test_a_run_of_epochs_has_the_steps_of_its_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = make_run(tmp_path / "a") / "config.toml"
    text = config.read_text()
    assert "train_steps" in text
    config.write_text("".join(line for line in text.splitlines(keepends=True) if "train_steps" not in line))
    config.write_text(config.read_text().replace("[run]\n", "[run]\ntrain_epochs = 3\n"))
    write(tmp_path / "a", Status("finished", 1000, 1200, "2 workers", 9, ProcessHost.own(), 1, "", 0.0))
    assert "  1,000/1,200  " in table(capsys, tmp_path)["a"]
    write(tmp_path / "a", Status("stopped", 1000, 0, "2 workers", 9, ProcessHost.own(), 1, "", 0.0))
    assert "  1,000  " in table(capsys, tmp_path)["a"]


@pytest.mark.parametrize(
    ("scheduler", "number", "expected"),
    [
        ("slurm", "1", "submitted"),
        ("slurm", "2", "died TIMEOUT"),
        ("slurm", "3", "died OUT_OF_MEMORY"),
        ("slurm", "4_0", "submitted"),
        ("slurm", "4_7", "died CANCELLED"),
        ("slurm", "5", "died CANCELLED"),  # known only to the accounting database
        ("slurm", "6", "unknown"),  # not known to Slurm
        ("pbs", "2", "submitted"),
        ("flux", "ƒ1", "submitted"),
        ("flux", "f2", "died TIMEOUT"),  # the id as Flux prints it in locales without ƒ
        ("flux", "ƒ3", "died CANCELED"),
        ("flux", "ƒ6", "unknown"),
        ("oar", "2", "submitted"),  # a batch system that only a later version may support
    ],
)
def test_a_submitted_run_has_the_state_of_its_job(
    scheduler: str, number: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = {
        "squeue": "1|RUNNING\n2|TIMEOUT\n3+0|OUT_OF_MEMORY\n3+1|OUT_OF_MEMORY\n4_0|PENDING\n4_[1-9%2]|CANCELLED\n",
        "sacct": "5|CANCELLED by 1000\n",
        "flux": "ƒ1 SCHED\nƒ2 TIMEOUT\nƒ3 CANCELED\n",
    }
    runs = tmp_path / "runs"
    write_submitted(runs / "a", "2 ranks", BatchJob(scheduler, number, "night"))
    write_submitted(runs / "other", "2 ranks", BatchJob("slurm", "1", "night"))
    for name, answer in answers.items():
        unknown = "echo 'flux-jobs: JobID ƒ6 unknown' >&2\n" if name == "flux" else ""
        printed = answer.replace("%", "%%")
        (tmp_path / name).write_text(f"#!/bin/sh\necho >>{tmp_path}/calls\nprintf '{printed}'\n{unknown}")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    state, description = described_states([runs / "a", runs / "other"])[runs / "a"]
    assert state == expected.split()[0]
    assert all(word in description for word in (*expected.split(), number))
    assert len((tmp_path / "calls").read_text().splitlines()) == (
        2 if number in ("5", "6") or scheduler == "flux" else 1
    )


def test_learners_are_listed_with_their_run_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "a")
    for name, merged in (("0", 12), ("task-3", 7)):
        folder = make_run(run / "learners" / name)
        with (folder / "metrics.jsonl").open("a") as file:
            line = {"merged_contributions": merged, "discarded_contributions": 2, "lag_versions": 1}
            file.write(json.dumps({"step": 1000, **line}) + "\n")
        write(folder, Status("running", 1000, 2000, "4 workers", 9, ProcessHost.own(), 1, "", 0.0))
    assert table(capsys, tmp_path).keys() == {"a"}
    rows = table(capsys, run)
    assert rows.keys() == {"a", "learners/0", "learners/task-3"}
    assert rows["learners/0"].split()[-3:] == ["12", "2", "1"]
    text = StringIO()
    Console(file=text, width=120).print(View(run).render(120, 30))
    lines = [line.split() for line in text.getvalue().splitlines()]
    assert [line[:4] for line in lines if line and line[0] in ("0", "task-3")] == [
        [name, "4", "workers", "1,000"] for name in ("0", "task-3")
    ]
    assert [shown.run.folder for shown in collect([run])] == [run, *(run / "learners" / n for n in ("0", "task-3"))]


def test_one_run_is_listed_with_what_its_time_went_into(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    account = Account(1e9, 1e9 + 200.0, 1000, {"steps": 150.0, "stopped": 40.0, "saving": 10.0})
    with (make_run(tmp_path / "a") / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 1000, **account.record()}) + "\n")
    learner = make_run(tmp_path / "a" / "learners" / "0")
    (learner / "metrics.jsonl").write_bytes((tmp_path / "a" / "metrics.jsonl").read_bytes())
    assert main(["runs", str(tmp_path)]) == 0
    assert account.describe() not in capsys.readouterr().out
    for folder, others in ((tmp_path / "a", "a: "), (learner, "")):
        assert main(["runs", str(folder)]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert f"{others}{account.describe()}" in lines


def test_a_run_of_learners_has_the_goodput_of_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "a")
    accounts = [Account(1e9, 1e9 + at, 10, {"steps": at - 20, "start": 20.0}) for at in (100.0, 300.0)]
    for number, account in enumerate(accounts):
        with (make_run(run / "learners" / str(number)) / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 1000, **account.record()}) + "\n")
    row = table(capsys, tmp_path)["a"]
    assert "90 %" in row
    assert main(["runs", str(run)]) == 0
    assert f"a: {total(accounts).describe()}" in capsys.readouterr().out.splitlines()
    shown = collect([run])
    assert [each.run.account for each in shown] == [total(accounts), *accounts]
    assert "90 %" in page(shown)


def test_a_submitted_run_is_listed_without_slurm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    write_submitted(tmp_path / "a", "2 ranks", BatchJob("slurm", "4711", "night"))
    row = table(capsys, tmp_path)["a"]
    assert all(word in row for word in ("night", "2 ranks", "submitted", "4711"))


def test_runs_are_sorted_by_any_metric(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, values in (("a", [0.5, 0.7, None]), ("b", [0.9, 0.2]), ("c", []), ("d", [0.6])):
        folder = make_run(tmp_path / name)
        with (folder / "metrics.jsonl").open("a") as file:
            for step, value in enumerate(values, 2000):
                file.write(json.dumps({"step": step, "validation_auc": value, "reward": step}) + "\n")
    rows = table(capsys, tmp_path, "--sort", "auc:max")
    assert {name: row.split()[-1] for name, row in rows.items()} == {"b": "0.9", "a": "0.7", "d": "0.6", "c": "-"}
    assert [*rows] == ["b", "a", "d", "c"]
    assert [*table(capsys, tmp_path, "--sort", "auc:min")] == ["b", "a", "d", "c"]
    assert next(iter(table(capsys, tmp_path, "--sort", "reward:max"))) == "a"
    assert table(capsys, tmp_path, "--sort", "loss").keys() == {"a", "b", "c", "d"}
    for sort in ("auc", "f1:max"):
        assert main(["runs", str(tmp_path), "--sort", sort]) == 2
        assert "auc" in capsys.readouterr().err


def test_a_run_that_has_measured_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "metrics.jsonl").touch()
    assert " -  " in table(capsys, tmp_path)["a"]


def test_a_run_that_died_at_once_is_at_its_newest_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, state in (("died", "running"), ("stopped", "stopped")):
        (tmp_path / name / "checkpoints").mkdir(parents=True)
        (tmp_path / name / "metrics.jsonl").touch()
        write(tmp_path / name, Status(state, 0, 100, "1 worker", 1, ProcessHost.own(), 1 << 22, "", 0.0))  # type: ignore[arg-type]
        for checkpoint in ("step-0000000040", "step-0000000030", "step-0000000050-1f-0-of-2"):  # the last is a shard
            (tmp_path / name / "checkpoints" / f"{checkpoint}.h5").touch()
    rows = table(capsys, tmp_path)
    assert rows["died"].split()[5] == "40"
    assert rows["stopped"].split()[5] == "0", "its own status has the step"


def test_a_run_whose_options_cannot_be_read_does_not_hide_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path / "good")
    make_run(tmp_path / "bad").joinpath("config.toml").write_text("= =")
    rows = table(capsys, tmp_path)
    assert "cannot be read" in rows["bad"]
    assert "mnist_mlp" in rows["good"]


def test_names_that_would_break_the_table_are_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["a\nb", "\x1b[31m", os.fsdecode(b"\xff")]
    for name in names:
        make_run(tmp_path / name)
    assert table(capsys, tmp_path).keys() == {"a\\nb", "\\x1b[31m", "\\udcff"}


def test_a_folder_that_is_none_is_reported_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert main(["runs", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"no runs in {tmp_path}\n"


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0.8, "0.8 s"),
        (9.99, "10 s"),
        (45, "45 s"),
        (59.9, "1 min"),
        (200, "3 min 20 s"),
        (7500, "2 h 5 min"),
        (86400, "1 d"),
        (529200, "6 d 3 h"),
        (float("nan"), "?"),
    ],
)
def test_durations(seconds: float, expected: str) -> None:
    assert duration(seconds) == expected


@pytest.mark.parametrize(("value", "expected"), [(950, "950"), (12400, "12,400"), (3.42e6, "3.4M"), (25e6, "25M")])
def test_amounts(value: float, expected: str) -> None:
    assert amount(value) == expected


def test_a_table_aligns_its_columns_and_escapes_control_characters() -> None:
    assert format_table(("a", "n"), [("x\n", "1,000"), ("long", "2 %")]).splitlines() == [
        "a         n",
        "x\\n   1,000",
        "long    2 %",
    ]
    assert format_table(("a", "b"), []) == "a  b"
