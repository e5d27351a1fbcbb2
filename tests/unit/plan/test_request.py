"""Requests: a command line and keyword arguments give equal requests, and so do the words of a request."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpitrain.cli.main import invoke
from mpitrain.cli.run import RunCommand
from mpitrain.cli.submit import SubmitCommand
from mpitrain.errors import ConfigError, UserError
from mpitrain.launcher.batch.request import SubmitRequest, submit_request
from mpitrain.plan.launch_options import LaunchOptions
from mpitrain.plan.request import JobRequest, LaunchRequest, launch_request

from ...support.launch import JOBS, PROGRAMS

SMALL, SCRIPT = JOBS / "small.py", PROGRAMS / "training_script.py"
JOB = """
from pathlib import Path
from typing import Literal

def job(width: int = 3, rate: float = 0.5, tag: str = "", folder: Path | None = None, deep: bool = True,
        kind: Literal["one", "two"] = "one", sizes: list[int] = [1], parts: list[bool] = []):
    raise NotImplementedError
"""


@pytest.fixture(autouse=True)
def _import_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", sys.path[:])


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.py"
    path.write_text(JOB)
    return path


def parsed(*words: object) -> LaunchRequest:
    request = invoke(RunCommand(lambda request: request), list(map(str, words)))
    assert isinstance(request, LaunchRequest)
    return request


def parsed_submit(*words: object) -> SubmitRequest:
    request = invoke(SubmitCommand(lambda request: request), list(map(str, words)))
    assert isinstance(request, SubmitRequest)
    return request


CASES: list[tuple[list[str], dict[str, Any]]] = [
    ([], {}),
    (["-n", "4", "--mode", "async", "--ps", "1"], {"ranks": 4, "mode": "async", "ps": 1}),
    (["--save-background", "--no-trace"], {"save_background": True, "trace": False}),
    (["--env", "A=b c", "--env", "D=1"], {"env": {"A": "b c", "D": 1}}),
    (["--env", "A=1", "--env", "B"], {"env": ["A=1", "B"]}),
    (["--env", "A=1"], {"env": "A=1"}),
    (
        ["--hosts", "a:2", "--link-timeout", "7", "--max-restarts", "2"],
        {"hosts": "a:2", "link_timeout": 7, "max_restarts": 2},
    ),
    (["--width", "5", "--rate=-1e-3", "--no-deep"], {"width": np.int64(5), "rate": -1e-3, "deep": False}),
    (["--rate", "inf", "--width", "6"], {"rate": float("inf"), "width": "6"}),
    (["--folder", "a b", "--tag=--x", "--kind", "two"], {"folder": Path("a b"), "tag": "--x", "kind": "two"}),
    (["--tag", "it's\n$(x)", "--sizes", "4,5"], {"tag": "it's\n$(x)", "sizes": (4, 5)}),
    (["--sizes", "", "--tag", ""], {"sizes": [], "tag": ""}),
    (["--parts", "true,no"], {"parts": [True, False]}),
    (["--run-dir=-night", "--seed", "0"], {"run_dir": "-night", "seed": 0, "resume": None}),
]


@pytest.mark.parametrize(("words", "values"), CASES, ids=str)
def test_the_command_line_and_python_make_equal_requests(words: list[str], values: dict[str, Any], job: Path) -> None:
    request = parsed(job, *words)
    assert request == launch_request(job, values)
    assert parsed(*request.words) == request


@pytest.mark.parametrize(
    ("words", "values"),
    [
        ([], {}),
        (
            ["-N", "2", "--time", "90", "--no-requeue", "--width", "4"],
            {"nodes": 2, "time": 90, "requeue": False, "width": 4},
        ),
        (["--sbatch=--nice=10", "--setup", "module load x"], {"sbatch": ["--nice=10"], "setup": "module load x"}),
        (
            ["--scheduler", "flux", "--job-name", "a b", "--train-steps", "5"],
            {"scheduler": "flux", "job_name": "a b", "train_steps": 5},
        ),
    ],
    ids=str,
)
def test_equal_requests_to_submit(
    words: list[str], values: dict[str, Any], job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MPITRAIN_SITE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert parsed_submit(job, *words) == submit_request(job, values)
    site = tmp_path / "site.toml"
    site.write_text('partition = "gpu"\nnodes = 3\n')
    request = submit_request(job, {**values, "site": site})
    assert request == parsed_submit(job, *words, "--site", site)
    assert (request.resources.partition, request.resources.nodes) == ("gpu", values.get("nodes", 3))


def test_a_file_of_options_is_read_by_both(job: Path, tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text("[run]\nbatch_size = 7\nlog_secs = 3\n[job]\nwidth = 2\nsizes = [3, 4]\n")
    request = parsed("--config", file, job, "--width", "9")
    assert request == launch_request(job, {"config": str(file), "width": 9})
    assert request.workload.config.training.batch_size == 7
    assert request.workload.arguments == {"width": 9, "sizes": [3, 4]}
    assert parsed(*request.words) == request


def test_scripts_have_a_command_line_of_their_own() -> None:
    request = parsed("-n", "2", "--train-steps", "5", SCRIPT, "--mode", "x")
    assert request.workload == JobRequest(SCRIPT, {"train_steps": 5}, {}, ("--mode", "x"))
    assert request.workload.words == ["--train-steps", "5", str(SCRIPT), "--mode", "x"]
    assert parsed(*request.words) == request
    launched = launch_request(SCRIPT, {"ranks": 2, "train_steps": 5, "epochs": 3, "fast": True})
    assert launched.workload.words == ["--train-steps", "5", str(SCRIPT), "--epochs", "3", "--fast"]
    submitted = parsed_submit("--nodes", "2", "--train-steps", "5", SCRIPT, "--nodes", "3")
    assert submitted.resources.nodes == 2 and submitted.workload.words == [
        "--train-steps",
        "5",
        str(SCRIPT),
        "--nodes",
        "3",
    ]
    assert submit_request(SCRIPT, {"nodes": 2, "train_steps": 5, "epochs": 3}).workload.words[-2:] == ["--epochs", "3"]


def test_a_request_is_immutable_and_keeps_what_was_given(job: Path) -> None:
    request = launch_request(job, {"seed": 0, "resume": "never"})
    assert request.workload.options == {"seed": 0, "resume": "never"}
    resumed = request.workload.with_options(resume="a.h5", seed=None)
    assert resumed.words == [str(job), "--resume", "a.h5"]
    assert request.workload.config.run.resume == "never"
    with pytest.raises(dataclasses.FrozenInstanceError):
        request.options = LaunchOptions()  # type: ignore[misc]
    with pytest.raises(TypeError):
        request.workload.options["seed"] = 1  # type: ignore[index]


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ({"ranks": 0}, ["--ranks is 0", ">= 1"]),
        ({"ranks": 2.5}, ["ranks=2.5", "integer"]),
        ({"ranks": True}, ["ranks=True", "integer"]),
        ({"batch_size": "many"}, ["batch_size='many'", "integer"]),
        ({"train_steps": {}}, ["train_steps={}", "integer"]),
        ({"mode": "asink"}, ["asink", "async"]),
        ({"dtype": "float23"}, ["dtype='float23'", "float32"]),
        ({"device": 3}, ["device=3", "cpu"]),
        ({"trace": "yes"}, ["trace='yes'", "True or False"]),
        ({"ps_hosts": 3}, ["ps_hosts=3", "list"]),
        ({"env": 3}, ["env=3", "dict"]),
        ({"env": [3]}, ["env=[3]", "strings"]),
        ({"link_timeout": 1}, ["--link-timeout is 1", ">= 5"]),
        ({"widht": 3}, ["'widht'", "'width'"]),
        ({"rank": 3}, ["'rank'", "'ranks'"]),
        ({"width": print}, ["width=", "integer"]),
        ({"sizes": [1, "x"]}, ["sizes=[1, 'x']", "integer"]),
        ({"sizes": 3}, ["sizes=3", "list of integer"]),
        ({"rate": Path("a")}, ["rate=", "float"]),
        ({"rate": True}, ["rate=True", "float"]),
        ({"folder": 3}, ["folder=3", "path"]),
        ({"tag": ["a"]}, ["tag=['a']", "text"]),
        ({"kind": 3}, ["kind=3", "one, two"]),
        ({"mode": "async", "ps": 1, "ps_hosts": ["a,b"]}, ["ps_hosts=['a,b']", "comma"]),
        ({"kind": "three"}, ["kind='three'", "'one', 'two'"]),
        ({"local_steps": 3}, ["--local-steps", "--mode local"]),
    ],
    ids=str,
)
def test_a_value_that_is_not_valid_is_named_in_a_line(values: dict[str, Any], parts: list[str], job: Path) -> None:
    with pytest.raises(UserError) as caught:
        launch_request(job, values)
    assert all(part in str(caught.value) for part in parts), caught.value
    assert "\n" not in str(caught.value)


def test_a_parameter_without_default_is_required(tmp_path: Path) -> None:
    path = tmp_path / "job.py"
    path.write_text("def job(x: int): pass\n")
    with pytest.raises(ConfigError, match="'x'"):
        launch_request(path, {})
    assert launch_request(path, {"x": 3}).workload.words == [str(path), "--x", "3"]


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(LaunchOptions)])
def test_a_job_has_no_parameter_with_the_name_of_an_option(name: str, tmp_path: Path) -> None:
    path = tmp_path / "job.py"
    path.write_text(f"def job({name}: int = 3): pass\n")
    with pytest.raises(UserError, match=name):
        launch_request(path, {})
