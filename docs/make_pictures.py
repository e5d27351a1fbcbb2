"""Make the pictures of the documentation from real runs.

    python docs/make_pictures.py [NAME ...]

Needs the environment of the tests, and Chromium for ``report``. ``speed`` shows results that ``bench/sync.py`` has
printed. Pictures are written to ``docs/pictures``.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from rich.console import Console
from rich.text import Text

from mpitrain.process import rank_status

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "pictures"
JOB = "mnist_mlp.py"
DATA = "/usr/share/datasets/fashion-mnist"  # Debian's package dataset-fashion-mnist
COLUMNS = 106
SPEEDS = ROOT / "bench" / "results" / "2026-11-21-sync.txt"
COLORS = {"load": "#4c72b0", "forward": "#55a868", "backward": "#c44e52", "average": "#8172b2", "update": "#ccb974"}
ENVIRONMENT = {**os.environ, "COLUMNS": str(COLUMNS), "OMPI_ALLOW_RUN_AS_ROOT": "1"}
ENVIRONMENT |= {"OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
ENVIRONMENT["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"


def run(command: str, folder: Path) -> str:
    """Return the output of a command."""
    words = ["bash", "-c", f"{command} 2>&1"]
    return subprocess.run(words, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, check=False).stdout


def draw_terminal(name: str, transcript: str) -> None:
    """Write a picture of a terminal with commands and their output."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    for line in transcript.rstrip().splitlines():
        text = Text.from_ansi(line)
        if line.startswith("$ "):
            text.stylize("bold green")
        elif line.startswith("mpitrain: "):
            text.stylize("yellow")
        console.print(text, soft_wrap=False)
    console.save_svg(str(PICTURES / f"{name}.svg"), title="mpitrain")


def terminal(folder: Path) -> None:
    """A run, one of whose ranks is killed, and its restart."""
    command = f"mpitrain run -n 2 --max-restarts 1 {JOB} --train-steps 20000 --run-dir runs/first"
    process = subprocess.Popen(
        command.split(), cwd=folder, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    while max((rank.step for rank in rank_status.read(folder / "runs" / "first")), default=0) < 9000:
        time.sleep(0.001)
    os.kill(rank_status.read(folder / "runs" / "first")[1].pid, signal.SIGKILL)
    output = process.communicate(timeout=120)[0]
    lines = [line for line in output.splitlines() if not line.startswith("step ")]
    draw_terminal("terminal", "\n".join([f"$ {command}", *lines, "$ mpitrain runs", run("mpitrain runs", folder)]))


def report(folder: Path) -> None:
    """The report of three runs with different learning rates."""
    for rate in ("0.0003", "0.001", "0.003"):
        flags = f"--data-dir {DATA} --learning-rate {rate} --train-steps 4000 --validate-steps 200"
        run(f"mpitrain run -n 2 {JOB} {flags} --run-dir runs/rate-{rate}", folder)
    run("mpitrain report runs", folder)
    words = ["--headless", "--no-sandbox", "--hide-scrollbars", "--window-size=1100,1000", "--virtual-time-budget=8000"]
    page = folder / "runs" / "report.html"
    subprocess.run(["chromium", *words, f"--screenshot={PICTURES / 'report.png'}", page.as_uri()], check=True)


def timeline(folder: Path) -> None:
    """Three steps of two ranks."""
    run(f"mpitrain run -n 2 {JOB} --hidden-units 500 --train-steps 80 --trace --run-dir runs/traced", folder)
    events = json.loads((folder / "runs" / "traced" / "trace.json").read_text())
    events = [e for e in (events if isinstance(events, list) else events["traceEvents"]) if e["ph"] == "X"]
    starts = [e["ts"] for e in events if e["name"] == "load" and e["pid"] == 0 and e["tid"] == 0]
    begin, end = starts[60], starts[63]
    figure, axes = plt.subplots(figsize=(8, 2.2))
    for event in events:
        if event["name"] in COLORS and begin <= event["ts"] < end and event["tid"] == 0:
            bar = [(event["ts"] - begin, event["dur"])]
            axes.broken_barh(bar, (0.6 - event["pid"], 0.8), color=COLORS[event["name"]])
    axes.set_yticks([1, 0], ["rank 0", "rank 1"])
    axes.set_xlabel("microseconds")
    handles = [plt.Rectangle((0, 0), 1, 1, color=color) for color in COLORS.values()]
    axes.legend(handles, COLORS, ncols=5, loc="upper center", bbox_to_anchor=(0.5, 1.3), frameon=False)
    figure.savefig(PICTURES / "timeline.svg", bbox_inches="tight")


def staleness(folder: Path) -> None:
    """How stale gradients are with three workers, by mode."""
    figure, axes = plt.subplots(figsize=(8, 2.6))
    modes = {"async": "", "ssp": "--staleness 1", "sync": ""}
    for number, (mode, flags) in enumerate(modes.items()):
        run_dir = folder / "runs" / mode
        servers = "" if mode == "sync" else "--ps 1"
        run(f"mpitrain run -n 4 {JOB} --mode {mode} {servers} {flags} --train-steps 6000 --run-dir {run_dir}", folder)
        lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        counts = next((line["staleness_histogram"] for line in lines if "staleness_histogram" in line), [1])[:8]
        shares = [100 * count / sum(counts) for count in counts]
        axes.bar([index + 0.27 * (number - 1) for index in range(len(shares))], shares, 0.25, label=f"{mode} {flags}")
    axes.set_xlabel("staleness in steps")
    axes.set_ylabel("% of gradients")
    axes.legend(frameon=False)
    figure.savefig(PICTURES / "staleness.svg", bbox_inches="tight")


def speed(folder: Path) -> None:
    """Examples per second of two ranks, against DistributedDataParallel, as ``bench/sync.py`` has printed them."""
    rows = re.findall(r"^(mlp100|mlp1024|cnn) +[\d,]+ +([\d,]+) +([\d,]+)", SPEEDS.read_text(), re.MULTILINE)[:3]
    titles = {"mlp100": "MLP, 100 hidden units", "mlp1024": "MLP, 1,024 hidden units", "cnn": "convolutional network"}
    figure, axes = plt.subplots(figsize=(8, 2.4))
    for index, (_, own, ddp) in enumerate(rows):
        ratio = int(own.replace(",", "")) / int(ddp.replace(",", ""))
        axes.barh(index - 0.2, ratio, 0.38, color="#4c72b0", label="mpitrain" if index == 0 else None)
        axes.barh(index + 0.2, 1, 0.38, color="#999999", label="DistributedDataParallel (gloo)" if index == 0 else None)
        axes.text(ratio + 0.05, index - 0.2, f"{own} examples/s", va="center", fontsize=8)
        axes.text(1.05, index + 0.2, f"{ddp}", va="center", fontsize=8)
    axes.set_yticks(range(len(rows)), [titles[name] for name, *_ in rows])
    axes.invert_yaxis()
    axes.margins(x=0.25)
    axes.set_xlabel("times the speed of DistributedDataParallel")
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(PICTURES / "speed.svg", bbox_inches="tight")


ALL: dict[str, Callable[[Path], None]] = {
    function.__name__: function for function in (terminal, report, timeline, staleness, speed)
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(ALL)}; all by default")
    names = parser.parse_args().names or list(ALL)
    for name in names:
        if name not in ALL:
            parser.error(f"there is no picture {name}; must be {', '.join(ALL)}")
    PICTURES.mkdir(exist_ok=True)
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            shutil.copy(ROOT / "jobs" / JOB, folder)
            ALL[name](Path(folder))


if __name__ == "__main__":
    main()
