"""The completions that a shell offers when the user presses Tab."""

from __future__ import annotations

import pytest

from mpitrain.cli.main import main

from ...support.launch import JOBS


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("mpitrain ru", {"run", "runs"}),
        ("mpitrain run --max-r", {"--max-restarts"}),
        ("mpitrain run JOB --hidden", {"--hidden-units"}),
        ("mpitrain run -n 2 --unknown JOB --train-st", {"--train-steps"}),
        ("mpitrain train nowhere.py --train-st", {"--train-steps"}),
        ("mpitrain submit --nod", {"--nodes"}),
        ("mpitrain submit --nodes 2 JOB --hidden", {"--hidden-units"}),
        ("mpitrain export runs --to n", {"npz"}),
    ],
)
def test_completions(
    line: str, expected: set[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = line.replace("JOB", str(JOBS / "small.py"))
    monkeypatch.setenv("_MPITRAIN_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
    with pytest.raises(SystemExit) as ended:
        main([])
    assert not ended.value.code
    assert {item.partition(",")[2] for item in capsys.readouterr().out.split()} == expected
