"""The chapter of the tutorial about clusters."""

from __future__ import annotations

import re
from pathlib import Path

from mpitrain.monitor.metrics import last_step

from ..support.launch import Mpi
from ..support.pages import Page, tutorial
from ..support.slurm.site import Site
from ..support.waiting import wait_until


class Reader:
    """Acts as a reader between the commands: waits, and uses the numbers of the submitted jobs."""

    def __init__(self, site: Site, folder: Path) -> None:
        self._cluster, self._folder = site.cluster, folder
        self.page: Page | None = None

    def prepare(self, command: str) -> str:
        assert self.page is not None
        for shown, printed in self.page.matched:
            if shown.startswith("job "):
                command = command.replace(_job(shown), _job(printed))
        command = command.replace("--train-steps 100000", "--train-steps 10000")  # a reader is slower than the test
        if match := re.match(r"scancel --batch --signal=USR1 (\d+)", command):
            self._cluster.wait(match[1], "RUNNING")
            metrics = self._folder / "runs" / "requeued" / "metrics.jsonl"
            wait_until(lambda: last_step(metrics) >= 100, "the run has 100 steps")
        if match := re.match(r"cat \S+/(\d+)\.log", command):
            if "requeued" in command:
                self._cluster.restart_now(match[1])
            self._cluster.wait(match[1])
        return command


def _job(line: str) -> str:
    match = re.match(r"job (\d+)", line)
    assert match is not None, line
    return match[1]


def test_cluster(site: Site, openmpi: Mpi) -> None:
    folder = site.folder / "tutorial"
    folder.mkdir()
    Page(tutorial("first_run"), folder).write_files()
    reader = Reader(site, folder)
    reader.page = Page(tutorial("cluster"), folder, site.environment(openmpi), reader.prepare)
    assert reader.page.execute() == 7
