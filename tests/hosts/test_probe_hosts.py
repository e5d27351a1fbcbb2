"""``mpitrain probe`` on several hosts."""

from __future__ import annotations

from pathlib import Path

from mpitrain.predict.measurements import read_probe

from ..support.hosts.runs import FLAGS
from ..support.hosts.training import Hosts
from ..support.launch import JOBS, Mpi, run


def test_a_probe_measures_links_and_exchanges_between_hosts(hosts: Hosts, openmpi: Mpi, tmp_path: Path) -> None:
    file = tmp_path / "probe.json"
    words = hosts.network.run(openmpi.python, [1, 1], *FLAGS, "--threads", "1", "-o", file, JOBS / "small.py")
    words[words.index("run", words.index("mpitrain"))] = "probe"
    done = run(words, timeout=120, env=hosts.network.environment, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    probe = read_probe(file)
    assert probe.ranks.ranks_per_node == (1, 1)
    assert probe.within is None and probe.between is not None and probe.exchanges is not None
    assert 1e7 < probe.between.bytes_per_s < 1e11
    assert 0 < probe.between.latency_s < 0.1 and 0 < probe.exchanges.request_s < 0.1
    assert probe.exchanges.sum_s_per_byte > 0
