"""``mpitrain report``: a self-contained page that shows the measurements."""

from __future__ import annotations

import base64
import html
import http.server
import itertools
import json
import os
import re
import shutil
import subprocess
import threading
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mpitrain.cli.main import main
from mpitrain.monitor.goodput import KINDS, SPARES, Account
from mpitrain.monitor.heartbeat import ProcessHost, Status, write
from mpitrain.process.run_directory import Failure, record_failure
from mpitrain.report import page as report
from mpitrain.report.charts import COLORS, Chart, PlottedRun, make_charts, thinned
from mpitrain.report.history import read_run
from mpitrain.report.page import collect, differences, labels, page

from ...support.launch import missing
from ...support.run_directories import make_run

SYNC = ["loss", "accuracy", "loss-by-time", "learning-rate", "throughput", "time-shares"]
WITH_SERVERS = ["staleness", "staleness-histogram", "workers", "workers-staleness"]


def names(shown: list[PlottedRun]) -> list[str]:
    return [chart.name for chart in make_charts(shown)]


def chart(shown: list[PlottedRun], name: str) -> Chart:
    return next(chart for chart in make_charts(shown) if chart.name == name)


def figures(text: str) -> dict[str, dict[str, Any]]:
    """Return the figures in a page, by name."""
    match = re.search(r'<script type="application/json" id="figures">(.*?)</script>', text)
    return {figure["name"]: figure for figure in json.loads(match[1])} if match else {}


def values_of(array: dict[str, str]) -> np.ndarray:
    return np.frombuffer(base64.b64decode(array["bdata"]), {"i4": np.int32, "f4": np.float32}[array["dtype"]])


def append(run: Path, *lines: dict[str, Any]) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def append_account(run: Path, **seconds: float) -> Account:
    """Record what the time of a run went into."""
    account = Account(1e9, 1e9 + sum(s for kind, s in seconds.items() if kind != SPARES), 1000, seconds)
    append(run, {"step": 1000, **account.record()})
    return account


def test_there_is_a_plot_for_what_was_measured_and_for_nothing_else(tmp_path: Path) -> None:
    both = collect([make_run(tmp_path / "a"), make_run(tmp_path / "b", mode="async", traced=False)])
    assert sorted(names(both[:1])) == sorted(SYNC)
    assert sorted(names(both)) == sorted(SYNC + WITH_SERVERS)
    append(tmp_path / "b", {"step": 1001, "dropped": 3}, {"step": 1001, "grad_norm": 2.5})
    assert {"dropped", "gradient-norm"} <= {*names(collect([tmp_path / "b"]))}


def test_further_metrics_have_plots_and_columns(tmp_path: Path) -> None:
    for name in ("a", "b"):
        make_run(tmp_path / name)
    append(tmp_path / "b", {"step": 1001, "validation_auc": None, "reward": None, "workers": []})
    append(tmp_path / "b", {"step": 1002, "validation_auc": 0.75, "reward": 3})
    shown = collect([tmp_path / "a", tmp_path / "b"])
    assert sorted(names(shown)) == sorted([*SYNC, "validation_auc", "reward"])
    assert all(f">final {title}</th>" in page(shown) for title in ("auc", "reward"))


def test_a_run_without_anything_measured_has_a_page(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    text = page(collect([tmp_path]))
    assert not figures(text) and "</html>" in text


def test_one_point_and_only_nan_can_be_drawn(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": null}\n{"step": 1, "validation_loss": 1.0}\n')
    assert "loss" in names(collect([tmp_path]))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": null}\n{"step": 2, "loss": null}\n')
    assert len(figures(page(collect([tmp_path])))["loss"]["data"]) == 1


@pytest.mark.parametrize("n", [1, 800, 801, 5000])
def test_thinning_loses_no_extreme_and_no_mean(n: int) -> None:
    values = np.random.default_rng(n).normal(size=n)
    x, low, mean, high = thinned(np.arange(n), values, 800)
    assert len(x) == min(n, 800)
    assert (low.min(), high.max()) == (values.min(), values.max())
    assert np.average(mean, weights=np.diff(x, prepend=-1)) == pytest.approx(values.mean())
    assert ((low <= mean) & (mean <= high)).all()


def test_a_figure_has_the_recorded_values(tmp_path: Path) -> None:
    shown = collect([make_run(tmp_path / "a")])
    training, validation = figures(page(shown))["loss"]["data"]
    for trace, name in ((training, "loss"), (validation, "validation_loss")):
        series = shown[0].run.series(name)
        np.testing.assert_array_equal(values_of(trace["x"]), series.steps)
        np.testing.assert_array_equal(values_of(trace["y"]), series.values.astype(np.float32))


def test_names_of_runs_are_text_and_nothing_else(tmp_path: Path) -> None:
    name = "<script>alert(1)<|script> $x_1$ & more"
    text = page(collect([make_run(tmp_path / name, traced=False), make_run(tmp_path / "b", note="<i>")]))
    assert "<script>alert" not in text
    assert "<i>" not in text
    assert html.escape(name) in text
    assert figures(text)["loss"]["data"][1]["name"] == html.escape(name, quote=False)


def test_loss_by_time_compares_equals(tmp_path: Path) -> None:
    both, without = make_run(tmp_path / "both"), tmp_path / "without"
    without.mkdir()
    append(without, *({"step": step, "time_s": step, "loss": 1 / step} for step in (1, 2, 3)))
    assert chart(collect([both]), "loss-by-time").y == "validation loss"
    mixed = chart(collect([both, without]), "loss-by-time")
    assert mixed.y == "training loss"
    runs = read_run(both), read_run(without)
    assert [len(curve.y) for curve in mixed.curves] == [len(run.series("loss")) for run in runs]


def test_curves_that_coincide_differ_in_color_and_dash(tmp_path: Path) -> None:
    shown = collect([make_run(tmp_path / str(number)) for number in range(24)])
    curves = chart(shown, "accuracy").curves
    assert len({(curve.color, curve.dash) for curve in curves}) == len(curves) == 24
    assert all(a.dash != b.dash for a, b in itertools.pairwise(curves[:8]))


def test_goodput_is_shown_with_all_other_parts_of_the_time(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, traced=False) for name in "abc"]
    assert "goodput" not in names(collect(runs))
    append_account(runs[0], steps=1.0)
    accounts = {
        "a": append_account(runs[0], steps=60.0, repeated=15.0, stopped=24.98, hooks=0.02, spares=25.0),
        "c": append_account(runs[2], steps=9.0, waiting=1.0),
    }
    bars = {trace["name"]: trace for trace in figures(page(collect(runs)))["goodput"]["data"]}
    assert list(bars) == ["steps", "waiting", "repeated", "stopped", "spares"]  # less than 0.1 % is not shown
    for kind, trace in bars.items():
        expected = [100 * account.shares.get(kind, 0.0) for account in accounts.values()]
        np.testing.assert_allclose(values_of(trace["x"]), expected, rtol=1e-6)
        assert [name[0] for name in trace["y"]] == list(accounts)
    assert sum(values_of(trace["x"]) for trace in bars.values()) == pytest.approx([100, 100], abs=0.1)


def test_axes(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    append(run, {"step": 1001, "loss": 3.6e-7})
    drawn = figures(page(collect([run])))
    assert drawn["accuracy"]["layout"]["yaxis"]["range"][1] == 1
    assert drawn["throughput"]["layout"]["yaxis"]["range"][0] == 0
    assert drawn["loss"]["layout"]["yaxis"]["type"] == "log"


def test_the_table_has_the_mean_speed_and_best_and_final_values(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", every=100)
    append(run, {"step": 3000, "step_s": 1e-3, "examples_per_s": 100.0, "validation_accuracy": 0.5, "loss": 2e-7})
    cells = report._cells(read_run(run), "a", "finished")
    before = read_run(run).series("examples_per_s").values[:-1].mean()
    assert read_run(run).mean_examples_per_s == pytest.approx((before * 1000 + 100 * 2000) / 3000, rel=1e-6)
    assert cells["final accuracy"] == "0.5000"
    assert cells["best accuracy, at step"].endswith(" at 1,000")
    assert float(cells["final loss"]) == 2e-7


def test_a_run_that_failed_says_why(tmp_path: Path) -> None:
    record_failure(make_run(tmp_path / "a"), Failure("rank 1 on <b>: it died", 1, "Traceback: <b>"))
    text = page(collect([tmp_path / "a"]))
    assert text.index("rank 1 on &lt;b&gt;: it died") < text.index("Traceback: &lt;b&gt;") < text.index("<figure")


class Addresses(HTMLParser):
    """Collects everything in a page that a browser might fetch, and every id."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.ids: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [tag] if tag in ("iframe", "link", "object", "embed", "img") else []
        self.found += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "srcset", "data")]
        self.ids += [value or "" for name, value in attrs if name == "id"]


def test_nothing_is_fetched_and_no_id_is_given_twice(tmp_path: Path) -> None:
    text = page(collect([make_run(tmp_path / "a"), make_run(tmp_path / "b", mode="async")]))
    addresses = Addresses(text)
    assert not addresses.found
    assert len(addresses.ids) == len(set(addresses.ids))
    assert {f"plot-{name}" for name in figures(text)} <= set(addresses.ids)


def test_the_page_of_many_long_runs_is_small(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / str(number), mode="async", steps=5000, every=2) for number in range(24)]
    assert len(page(collect(runs))) < 4_000_000
    assert len(page(collect(runs[:1]))) < 2_500_000


def test_the_page_reports_what_differs(tmp_path: Path) -> None:
    a = {"run": {"mode": "sync", "seed": 1, "run_dir": "x"}, "versions": {"numpy": "2"}}
    b = {"run": {"mode": "sync", "seed": 2, "run_dir": "y"}, "versions": {"numpy": "2", "extra": "1"}}
    assert differences([a, b]) == [("seed", ["1", "2"]), ("extra", ["", "1"])]
    assert differences([a]) == []


def test_versions_are_apart_from_options(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / str(seed), seed=seed) for seed in (1, 2)]
    for seed, run in enumerate(runs):
        config = (run / "config.toml").read_text().replace("[run]\n", f"[run]\nkeep = {seed}\n")
        (run / "config.toml").write_text(config.replace('python = "3.11"', f'python = "3.1{seed}"'))
    tables = re.findall(r"<h2>(\w+) that differ</h2>(.*?)</section>", page(collect(runs)), re.DOTALL)
    assert [kind for kind, _ in tables] == ["Options", "Versions"]
    assert [re.findall(r"<tr><td>(\w+)</td>", table) for _, table in tables] == [["keep"], ["python"]]


def test_labels_are_as_short_as_they_can_be() -> None:
    assert labels([Path("/x/a"), Path("/x/b")]) == ["a", "b"]
    assert labels([Path("/x/a"), Path("/y/a"), Path("/y/b")]) == ["x/a", "y/a", "y/b"]


def test_the_page_sums_up_where_the_time_went(tmp_path: Path) -> None:
    text = page(collect([make_run(tmp_path / "a", ranks=3)]))
    found = re.search(r"(\d+) % compute, (\d+) % exposed communication, (\d+) % waiting", text)
    assert found is not None
    assert sum(map(int, found.groups())) <= 101
    assert re.search(r"\d+ % of it for rank \d \(worker \d, on node1\)", text)


def test_many_ranks_are_shown_as_their_mean(tmp_path: Path) -> None:
    text = page(collect([make_run(tmp_path / "a", ranks=30)]))
    assert "mean of 30" in text


def test_the_commands_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run")
    assert main(["report", str(run)]) == 0
    assert capsys.readouterr().out.strip() == str(run / "report.html")
    assert main(["report", "--png", str(run), "-o", str(tmp_path / "plots")]) == 0
    written = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert [path.stem for path in written] == names(collect([run]))
    for path in written:
        with Image.open(path) as image:
            assert image.width > 500


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["none"], "mpitrain: none: "),
        (["nothing"], "mpitrain: nothing "),
        (["run", "run/../run"], "/run "),
        (["run", "-o", "none/x.html"], "none/x.html "),
        ([], "no RUN "),
        (["--png", "empty"], "metrics"),
        (["--png", "run", "-o", "a.html"], "a.html"),
    ],
)
def test_mistakes_are_reported_in_a_line(
    tmp_path: Path, words: list[str], expected: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(tmp_path / "run")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "metrics.jsonl").touch()
    (tmp_path / "nothing").mkdir()
    monkeypatch.chdir(tmp_path)
    assert main(["report", *words]) == 2
    error = capsys.readouterr().err
    assert expected in error
    assert error.count("\n") == 1


def test_without_a_run_the_latest_is_used_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for age, name in enumerate(("new", "old", "older")):
        for path in make_run(tmp_path / "runs" / name, traced=False).iterdir():
            os.utime(path, times=(path.stat().st_mtime - 100 * age,) * 2)
    monkeypatch.chdir(tmp_path)
    assert main(["report"]) == 0
    captured = capsys.readouterr()
    assert captured.out.strip() == str(Path("runs", "new", "report.html"))
    assert captured.err.split()[-1] == str(Path("runs", "new"))
    assert main(["stacks"]) == 2  # the run has no ranks
    assert "runs/new" in capsys.readouterr().err


def test_a_missing_package_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report.importlib.util, "find_spec", lambda name: None)
    assert main(["report", str(tmp_path)]) == 2
    assert "pip install 'mpitrain[report]'" in capsys.readouterr().err


FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-proxy-server",
    "--hide-scrollbars",
    "--virtual-time-budget=20000",  # the plots are drawn after the page has been loaded
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",  # Chromium's own requests fail
]


class Site(http.server.ThreadingHTTPServer):
    """Serves one page to this machine, and records the requested paths."""

    def __init__(self, text: str) -> None:
        asked = self.asked = []

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                asked.append(self.path)
                self.send_response(200 if self.path == "/" else 404)
                self.send_header("Content-Type", "text/html; charset=utf-8")
                self.end_headers()
                self.wfile.write(text.encode() if self.path == "/" else b"")

            def log_message(self, *arguments: object) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server_address[1]}/"
        threading.Thread(target=self.serve_forever, daemon=True).start()


def chromium() -> str:
    path = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chrome")
    return path or missing("a Chromium to look at the page with (Debian's package chromium)")


def render(address: str, width: int, height: int, folder: Path) -> tuple[np.ndarray, set[str]]:
    """Return the page as Chromium shows it, and the addresses that the page requested."""
    picture, log = folder / f"{width}.png", folder / f"{width}.json"
    words = [chromium(), *FLAGS, f"--user-data-dir={folder / f'profile{width}'}", f"--window-size={width},{height}"]
    words += [f"--screenshot={picture}", f"--log-net-log={log}", address]
    subprocess.run(words, check=True, timeout=60, capture_output=True)
    with Image.open(picture) as image:
        pixels = np.asarray(image.convert("RGB"))
    events = [event.get("params", {}) for event in json.loads(log.read_text())["events"]]
    return pixels, {
        event["url"] for event in events if event.get("initiator") == address.rstrip("/") and "url" in event
    }


def count(pixels: np.ndarray, color: str) -> int:
    wanted = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)])
    return int((np.abs(pixels.astype(int) - wanted).max(axis=-1) < 8).sum())


@pytest.mark.full
def test_a_browser_shows_the_plots_and_asks_for_nothing_else(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / name, mode=mode) for name, mode in (("a", "sync"), ("b", "async"))]
    write(folders[0], Status("finished", 1000, 1000, "2 workers", 1, ProcessHost("h", "b", "p"), 1, "1", 0.0))
    append_account(folders[0], steps=60, repeated=40)
    with Site(page(collect(folders))) as site:
        for width, height in ((1280, 4000), (420, 8000)):
            pixels, asked = render(site.address, width, height, tmp_path)
            assert pixels.shape[1] == width
            for color in COLORS[:2]:
                assert count(pixels, color) > 300, f"no curve in {color} at {width} pixels"
            assert count(pixels, "#B2182B") > 300, f"no repeated steps at {width} pixels"
            # The last plot is visible: its bars have a colour that no other plot has.
            assert count(pixels, "#56B4E9") > 200
            assert asked <= {f"{site.address}favicon.ico"}
        site.shutdown()
    assert set(site.asked) <= {"/", "/favicon.ico"}


@pytest.mark.full
def test_a_page_that_asks_for_something_is_seen_to(tmp_path: Path) -> None:
    with Site("<img src='/local.png'><img src='http://127.0.0.2:9/remote.png'>") as site:
        _, asked = render(site.address, 300, 300, tmp_path)
        site.shutdown()
    assert {f"{site.address}local.png", "http://127.0.0.2:9/remote.png"} <= asked
    assert "/local.png" in site.asked


@pytest.mark.full
@pytest.mark.parametrize("width", [1280, 420])
def test_legends_are_below_the_titles_of_axes(tmp_path: Path, width: int) -> None:
    name = "a long name of a run"  # one line of the legend per run at 420 pixels
    document = tmp_path / "page.html"
    runs = [make_run(tmp_path / f"{name} {i}") for i in range(4)]
    append_account(runs[0], **dict.fromkeys(KINDS, 1.0))
    document.write_text(page(collect(runs)))
    words = [*FLAGS, f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={width},4000"]
    done = subprocess.run(
        [chromium(), *words, "--virtual-time-budget=10000", "--dump-dom", document.as_uri()],
        check=True,
        timeout=60,
        capture_output=True,
        text=True,
    )
    places = re.findall(
        r'<g class="legend"[^>]*translate\([\d.]+,([\d.]+)\).*?class="xtitle"[^>]* y="([\d.]+)"', done.stdout
    )
    assert len(places) >= 4
    for legend, title in places:
        assert float(legend) > float(title) + 4  # the baseline of the title, and what letters such as p need below it
