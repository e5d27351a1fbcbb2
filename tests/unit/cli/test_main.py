"""Errors of users of other programs: one line with the corresponding command or flag of mpitrain."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from mpitrain import Job, nn, optim
from mpitrain.cli.main import main
from mpitrain.errors import JobError

from ...support.launch import JOBS, one_line

JOB = """
from mpitrain import Job, data, nn, optim

def job() -> Job:
    digits = data.mnist(None)
    model = nn.Dense(digits.features, 10)
    return Job(model=model, loss=nn.SoftmaxCrossEntropy(), optimizer=optim.sgd(0.1), train=digits.train)
"""


def refused(capsys: pytest.CaptureFixture[str], *words: str | Path) -> str:
    """Return the only line that the command prints before it exits with status 2."""
    assert main(list(map(str, words))) == 2
    out, err = capsys.readouterr()
    assert not out and err.splitlines() == [one_line(err)]
    return err


def test_a_job_file_without_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert "mpitrain run jobs/mnist_mlp.py" in refused(capsys, "jobs/mnist_mlp.py", "--train-steps", "3")


@pytest.mark.parametrize("option", ["--job_name=ps", "--task_index", "--ps_hosts=a,b", "--worker_hosts"])
@pytest.mark.parametrize("before", [True, False])
def test_roles_given_as_in_tensorflow(option: str, before: bool, capsys: pytest.CaptureFixture[str]) -> None:
    words = [option, JOBS / "small.py"] if before else [JOBS / "small.py", option]
    assert "mpitrain run -n N --ps K" in refused(capsys, "placement", *words)


def test_arrays_instead_of_a_split() -> None:
    arrays = np.zeros((100, 4)), np.zeros(100)
    with pytest.raises(JobError, match=r"^.*data\.from_arrays.*$"):
        Job(model=nn.Dense(4, 10), loss=nn.SoftmaxCrossEntropy(), optimizer=optim.sgd(0.1), train=arrays)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("old", "new", "line", "hint"),
    [
        ("import Job", "import Jobb", 2, "'Job'"),
        ("digits.features", "digit.features", 6, "'digits'"),
        ("digits.features", "digits.feature", 6, "'features'"),
        ("nn.Dense(", "nn.DENSE(", 6, "'Dense'"),
        ("loss=", "losss=", 7, "'loss'"),
        ("sgd(0.1", "adam(0.1, beta=0.9", 7, "'beta"),
        ("0.1", "'0.1'", 7, "learning rate"),
        ("loss=nn.SoftmaxCrossEntropy()", "loss=nn.SoftmaxCrossEntropy", 7, "nn.SoftmaxCrossEntropy()"),
        ("model=model", "model=[model]", 7, "nn.Sequential"),
        ("model=model", "model=model, hooks=1", 7, "hooks=..."),
        ("digits.features", "63", 7, "in_features=64"),
    ],
    ids=str,
)
def test_errors_name_the_line_and_the_fix(old: str, new: str, line: int, hint: str, job, capsys) -> None:
    path = job(JOB.replace(old, new, 1))
    message = refused(capsys, "placement", path)
    assert f"{path}, line {line}: " in message and hint in message


@pytest.mark.parametrize("method", ["begin(self)", "at_consistent_point(self, loop)", "forward(self, x)"])
def test_a_hook_or_layer_whose_method_takes_other_arguments(method: str, job, capsys) -> None:
    base, given = ("nn.Layer", "model=Mine()") if "forward" in method else ("Hook", "hooks=[Mine()], model=model")
    text = JOB.replace("import Job", "import Hook, Job").replace("model=model", given)
    path = job(f"{text}\nclass Mine({base}):\n    def {method}: ...\n")
    message = refused(capsys, "placement", path)
    assert ", line 7: " in message and f"Mine.{method.replace('(', ' takes (')}" in message


@pytest.mark.parametrize(
    "text", ["parser.parse_args()", "parser.parse_args(['--help'])", "def job():\n    parser.parse_args()", "exit(1)"]
)
def test_a_job_file_that_parses_the_command_line(
    text: str, job, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    function = "" if "def" in text else "def job(): ...\n"
    path = job(f"import argparse\nparser = argparse.ArgumentParser()\nparser.print_help = print\n{text}\n{function}")
    monkeypatch.setattr(sys, "argv", ["mpitrain", "placement", str(path)])
    assert main(sys.argv[1:]) == 2
    assert "def job(...)" in capfd.readouterr().err.splitlines()[-1]  # after the parser's output


def test_job_files_import_from_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "a_job.py").write_text("import package_of_the_user.module\n" + JOB)
    (tmp_path / "package_of_the_user").mkdir()
    (tmp_path / "package_of_the_user" / "module.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert main(["placement", "jobs/a_job.py"]) == 0
