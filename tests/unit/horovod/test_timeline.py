"""The file of a timeline: complete JSON with the activity of each tensor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from mpitrain.horovod import timeline as module  # noqa: E402
from mpitrain.horovod.request import Handle, ReduceOp, Request  # noqa: E402
from mpitrain.horovod.timeline import Timeline  # noqa: E402


def handle(name: str) -> Handle:
    return Handle(Request("allreduce", name, torch.float32, ((2,),), ReduceOp.Sum))


def events(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())  # type: ignore[no-any-return]


@pytest.mark.parametrize("buffered", [1, 3, 1000])
def test_every_tensor_has_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, buffered: int) -> None:
    monkeypatch.setattr(module, "_BUFFERED", buffered)
    line, path = Timeline(), tmp_path / "a.json"
    early, first, second = handle("early"), handle("a"), handle("")
    line.began([(early.request, early)])  # before the start
    line.start(str(path), mark_cycles=True)
    line.cycle()
    line.began([(first.request, first), (second.request, second), (handle("joined").request, None)])
    line.ended(second)
    line.ended(first)
    line.stop()
    line.ended(early)
    line.stop()
    found = events(path)
    rows = {event["args"]["name"]: event["pid"] for event in found if event["name"] == "process_name"}
    assert rows == {"engine": 0, "allreduce.a": 1, "allreduce.noname": 2}
    for row in (1, 2):
        own = [(event["ph"], event["name"]) for event in found if event["pid"] == row and event["ph"] in "BE"]
        negotiated = [("B", "NEGOTIATE_ALLREDUCE"), ("E", "NEGOTIATE_ALLREDUCE")]
        assert own == [*negotiated, ("B", "ALLREDUCE"), ("E", "ALLREDUCE")]
    (begun, *_) = (event for event in found if event["name"] == "ALLREDUCE")
    assert begun["args"] == {"operation": first.request.text, "fused": 3}
    assert [event["ph"] for event in found if event["name"] == "CYCLE_START"] == ["i"]
    assert all(event["ts"] >= 0 for event in found)


def test_a_new_file_completes_the_former_one(tmp_path: Path) -> None:
    line, paths = Timeline(), [tmp_path / name for name in ("a.json", "b.json")]
    for path in paths:
        line.start(str(path), mark_cycles=False)
        line.cycle()
    line.stop()
    assert [[event["name"] for event in events(path)] for path in paths] == [["process_name"]] * 2
    with pytest.raises(OSError, match="nowhere"):
        line.start(str(tmp_path / "nowhere" / "c.json"), mark_cycles=False)
