"""The workload of a probe: its command line, and options without an effect."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpitrain.errors import ConfigError
from mpitrain.plan.request import JobRequest
from mpitrain.probe.request import ProbeWorkload, options_of_modes

JOB, OUTPUT = Path("a job.py"), Path("out.json")


def test_the_command_line_has_the_options_of_the_job() -> None:
    job = JobRequest(JOB, {"batch_size": 7, "run_dir": Path("here"), "time_limit": 60.0}, {"hidden_units": 3})
    probe = ProbeWorkload(job, OUTPUT)
    assert probe.words[:2] == ["--output", "out.json"] and probe.words[2:] == job.words
    assert (probe.run_dir, probe.time_limit, probe.command) == (Path("here"), 60.0, "measure")
    assert probe.restarted(Path("checkpoint"), 5.0) is probe and not probe.keeps_checkpoints and not probe.resumes
    probe.check_ranks(10**6)
    moved = probe.with_options(run_dir=Path("there"))
    assert moved.run_dir == Path("there") and moved.job.options["batch_size"] == 7 and moved.output == OUTPUT


@pytest.mark.parametrize(
    ("name", "value", "text"), [("mode", "async", "--mode"), ("ps", 1, "--ps"), ("local_steps", 3, "--local-steps")]
)
def test_options_of_modes_are_refused(name: str, value: object, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        ProbeWorkload(JobRequest(JOB, {name: value, **({"mode": "local"} if name == "local_steps" else {})}), OUTPUT)


def test_a_run_to_join_is_refused() -> None:
    with pytest.raises(ConfigError, match="--join"):
        ProbeWorkload(JobRequest(JOB, {"join": Path("run")}), OUTPUT)


@pytest.mark.parametrize("arguments", [(), ("--epochs", "3")])
def test_a_script_is_refused(arguments: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=str(JOB)):
        ProbeWorkload(JobRequest(JOB, script_arguments=arguments), OUTPUT)


def test_which_options_are_of_modes() -> None:
    names = ["batch_size", "mode", "ps", "threads", "compress", "local_steps"]
    assert set(options_of_modes(names)) >= {"mode", "ps", "local_steps"}
    assert {"batch_size", "threads"}.isdisjoint(options_of_modes(names))
