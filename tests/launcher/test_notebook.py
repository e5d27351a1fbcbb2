"""The guide "Notebooks" works as written: its code, executed cell by cell in a Jupyter kernel."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from ..support.launch import LAUNCHER_ENVIRONMENT, ROOT, missing
from ..support.waiting import wait_until

GUIDE = ROOT / "docs" / "notebooks.md"
STOP = "# press the stop button"


def test_the_guide_runs_as_a_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        import ipykernel  # noqa: F401
        import nbformat
        import pandas  # noqa: F401
        from nbclient import NotebookClient
    except ImportError as error:
        missing(f"{error.name}; 'make env' installs it")
    for name, value in LAUNCHER_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    texts = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    cells = [nbformat.v4.new_code_cell(text.rstrip()) for text in texts]
    for cell in cells:
        cell.metadata["tags"] = ["raises-exception"] if STOP in cell.source else []

    tasks = []

    async def press_stop(cell: Any, cell_index: int) -> None:
        if STOP in cell.source:
            tasks.append(asyncio.create_task(interrupt_when_it_trains(tmp_path, client.km)))

    notebook = nbformat.v4.new_notebook(cells=cells)
    client = NotebookClient(
        notebook,
        timeout=60,
        kernel_name="python3",
        resources={"metadata": {"path": tmp_path}},
        on_cell_execute=press_stop,
    )
    client.execute()
    outputs = {cell.source: cell.outputs for cell in cells}
    (plot,) = (found for source, found in outputs.items() if ".plot(" in source)
    assert any("image/png" in output.get("data", {}) for output in plot)
    (stopped,) = (found for source, found in outputs.items() if STOP in source)
    assert stopped[-1].ename == "KeyboardInterrupt"
    ends = [output for outputs in outputs.values() for output in outputs if "finished" in str(output.get("data"))]
    assert len(ends) == 2  # of the first run, and of the run that was stopped and resumed


async def interrupt_when_it_trains(folder: Path, kernel: Any) -> None:
    """Interrupt the kernel, as the stop button does, when the second run of a folder trains."""
    trains = lambda: len([*folder.glob("runs/*/metrics.jsonl")]) >= 2  # noqa: E731
    await asyncio.to_thread(wait_until, trains, "the second run trains")
    await kernel.interrupt_kernel()
