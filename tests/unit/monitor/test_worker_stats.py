"""Reports of worker statistics."""

from __future__ import annotations

from mpitrain.monitor import worker_stats
from mpitrain.monitor.worker_stats import WorkerStats


def account(steps, staleness=0, stalest=0, dropped=0, histogram=(0, 0, 0)):
    return WorkerStats(steps, dropped, staleness, stalest, steps + dropped, tuple(histogram))


def test_since_counts_what_came_between():
    before = [account(10, 5, 1, histogram=(5, 5, 0)), account(10, 0, 0, histogram=(10, 0, 0))]
    now = [account(20, 25, 2, histogram=(5, 5, 10)), account(20, 0, 0, dropped=3, histogram=(20, 0, 0))]
    assert worker_stats.since(before, now, 500, [[100, 50], [500]]) == {
        "staleness_mean": 1.0,
        "staleness_max": 2.0,
        "moved_bytes": 500 * (10 + 10 + 3) + 150 * 10 + 500 * 10.0,
        "dropped": 3.0,
    }
    assert worker_stats.since([], [], 500, ()) == {}
    assert worker_stats.since(now, now, 500, ()) == {}


def test_half_of_anothers_share_is_warned_of():
    none = [account(0)] * 3
    assert worker_stats.uneven_speed_warning(none[:2], [account(100), account(51)]) == ""
    warning = worker_stats.uneven_speed_warning(none, [account(100), account(80), account(25)])
    assert "worker 2" in warning
    assert "worker 0" in warning
    assert worker_stats.uneven_speed_warning(none[:2], [account(20), account(1)]) == "", "too early to tell"
    assert worker_stats.uneven_speed_warning([account(100), account(0)], [account(200), account(90)]) == "", (
        "it was late at first"
    )
    assert worker_stats.uneven_speed_warning(none[:1], [account(1000)]) == ""


def test_table_names_every_worker():
    text = worker_stats.table(
        [account(100, 50, 3, 2, (50, 50, 0)), account(99)], ["a", "b"], batch=10, moved_bytes=[1000, 2000], seconds=2.0
    )
    lines = text.splitlines()
    assert lines[1].split()[:4] == ["0", "a", "100", "500"]
    assert lines[2].split()[:3] == ["1", "b", "99"]
    assert "0: 50 %" in lines[-1]


def test_servers_give_out_what_is_read_and_receive_what_is_taken():
    text = worker_stats.server_table(["h1"], [100], [account(30, dropped=20), account(10)], [[25], [100]])
    assert text.splitlines()[1].split() == ["0", "h1", "100", "bytes", "40", "1,750", "bytes", "6,000", "bytes"]
