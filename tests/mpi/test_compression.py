"""Compressed gradients between nodes; every rank counts as a node, because memory is not shared."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from ..support.launch import JOBS, PROGRAMS, with_checkout
from ..support.results import SMALL, assert_close, assert_same_bits, final
from ..support.world.controller import World

NODES = ("--no-shared-memory", "--bucket-bytes", "0")


ENVIRONMENT = {"PYTHONPATH": f"{PROGRAMS}:{with_checkout()['PYTHONPATH']}"}


def train(world: World, n: int, run_dir: Path, *flags: str, job: Path = SMALL) -> dict[str, np.ndarray]:
    world.train(n, job, "--batch-size", str(12 // n), "--run-dir", run_dir, *NODES, *flags, env=ENVIRONMENT)
    return final(run_dir)


def trained(results: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the parameters."""
    return {name: values for name, values in results.items() if name.startswith("params/")}


def total(run_dir: Path, name: str) -> float:
    """Return the sum of a value over all lines of ``metrics.jsonl`` that have this value."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return sum(line.get(name, 0) for line in lines)


@pytest.mark.parametrize("flags", [(), ("--optimizer", "lamb"), ("--clip-norm", "0.5")], ids=str)
@pytest.mark.parametrize("n", [2, 3])
def test_a_codec_without_error_changes_nothing(world: World, n: int, flags: tuple[str, ...], tmp_path: Path) -> None:
    flags = (*flags, "--dtype", "float64")
    exact = trained(train(world, n, tmp_path / "exact", *flags))
    found = trained(train(world, n, tmp_path / "codec", *flags, "--compress", "own_codecs:Identity"))
    assert_close(found, exact, 1e-12)


@pytest.mark.parametrize(("codec", "tolerance"), [("bfloat16", 6e-2), ("float16", 6e-3), ("int8", 0.1)])
def test_a_codec_comes_close_to_the_exact_result(world: World, codec: str, tolerance: float, tmp_path: Path) -> None:
    flags = ("--optimizer", "momentum")
    exact = trained(train(world, 3, tmp_path / "exact", *flags))
    found = trained(train(world, 3, tmp_path / "codec", *flags, "--compress", codec))
    assert_close(found, exact, tolerance)
    assert any(found[name].tobytes() != exact[name].tobytes() for name in found), "nothing was compressed"
    sent, saved = (total(tmp_path / "codec", name) for name in ("internode_bytes", "saved_bytes"))
    assert sent + saved == total(tmp_path / "exact", "internode_bytes") > 0
    assert 0.2 < sent / (sent + saved) < 0.6


@pytest.mark.parametrize("codec", ["bfloat16", "int8", "powersgd:1", "own_codecs:Signs"])
@pytest.mark.parametrize("more", [(), ("--compress-after", "20")], ids=str)
def test_resuming_is_never_having_stopped(world: World, codec: str, more: tuple[str, ...], tmp_path: Path) -> None:
    flags = ("--compress", codec, *more)
    whole = train(world, 3, tmp_path / "whole", *flags)
    train(world, 3, tmp_path / "parts", *flags, "--train-steps", "37")
    assert_same_bits(train(world, 3, tmp_path / "parts", *flags), whole)


@pytest.mark.parametrize("codec", ["int8", "powersgd:2"])
def test_on_other_nodes_the_error_is_kept(world: World, codec: str, tmp_path: Path) -> None:
    """The first node gets the errors of all nodes, added up; the other nodes begin without an error."""
    flags = ("--compress", codec, "--optimizer", "momentum")
    train(world, 3, tmp_path, *flags, "--train-steps", "37")
    before = final(tmp_path)
    train(world, 2, tmp_path / "other", *flags, "--resume", str(tmp_path), "--train-steps", "37")
    after = final(tmp_path / "other")
    errors = [values for name, values in before.items() if "residual." in name]
    assert len(errors) == 3 and all(error.any() for error in errors)
    first, second = (after[name] for name in sorted(after) if "residual." in name)
    np.testing.assert_allclose(first, sum(errors), rtol=1e-5, atol=1e-7)
    assert not second.any()


@pytest.mark.parametrize("codec", ["int8", "own_codecs:Signs"])
def test_a_skipped_step_has_no_effect_on_later_ones(world: World, codec: str, tmp_path: Path) -> None:
    """NaN of the skipped step must not stay in the gaps between parameters, which no layer writes."""
    flags = ("--nan", "skip", "--log-steps", "1")
    exact, compressed = tmp_path / "exact", tmp_path / "compressed"
    train(world, 2, exact, *flags, job=JOBS / "nan_example.py")
    results = train(world, 2, compressed, *flags, "--compress", codec, job=JOBS / "nan_example.py")
    assert total(compressed, "skipped_steps") == total(exact, "skipped_steps") > 0
    assert all(np.isfinite(values).all() for values in results.values())


ONE_NODE = ("--shared-memory",)
LOCAL = ("--mode", "local", "--outer-optimizer", "nesterov")


@pytest.mark.parametrize(
    ("flags", "option"),
    [
        (("--compress", "int8"), ""),
        ((*LOCAL, "--compress", "int8", *ONE_NODE), "--compress"),
        (("--compress", "powersgd:1000"), "--compress powersgd:1000"),
        (("--compress", "int8", "--compress-after", "10"), "--compress-after"),
        (("--mode", "local", "--local-after", "10"), "--local-after"),
        ((*LOCAL, "--local-steps", "11"), "--outer-optimizer nesterov"),
        ((*LOCAL, "--local-steps", "10"), ""),
    ],
    ids=str,
)
def test_options_without_effect_are_reported(world: World, flags: tuple[str, ...], option: str, tmp_path: Path) -> None:
    done = world.train(2, SMALL, *NODES, "--train-steps", "10", "--run-dir", tmp_path, *flags)
    notices = [line for line in done.stdout.splitlines() if "no effect" in line]
    assert len(notices) == (1 if option else 0)
    assert all(option in notice for notice in notices)


@pytest.mark.parametrize("flags", [(), LOCAL, ("--mode", "async", "--ps", "1")], ids=str)
def test_a_codec_must_use_the_same_number_of_bytes_on_all_ranks(world: World, flags: tuple[str, ...]) -> None:
    words = (*NODES, "--compress", "own_codecs:UnequalBytes", *flags)
    assert "own_codecs:UnequalBytes" in world.refusal(2, SMALL, *words, env=ENVIRONMENT)


@pytest.mark.quick
@pytest.mark.parametrize("nodes", ["0 1", "0 0 1 1", "0 1 1", "0 1 2"], ids=lambda nodes: nodes.replace(" ", ""))
def test_nothing_is_lost_and_all_nodes_get_the_same(each_world: World, nodes: str) -> None:
    words = nodes.split()
    assert each_world.run(len(words), PROGRAMS / "node_sums.py", *words).stdout.strip() == "ok"


def served(world: World, n: int, run_dir: Path, *flags: str) -> dict[str, np.ndarray]:
    """Train with a server that shares memory with no worker."""
    flags = ("--mode", "async", "--ps", "1", "--no-shared-memory", "--no-normalize", *flags)
    world.train(n + 1, SMALL, "--batch-size", str(12 // n), "--run-dir", run_dir, *flags)
    return final(run_dir)


def test_a_worker_that_sends_all_has_no_momentum(world: World, tmp_path: Path) -> None:
    """The velocity of an element that was sent is reset, so the result is that of gradient descent."""
    flags = ("--dtype", "float64", "--clip-norm", "0.5")
    exact = trained(served(world, 1, tmp_path / "exact", *flags, "--optimizer", "sgd"))
    found = trained(served(world, 1, tmp_path / "found", *flags, "--optimizer", "momentum", "--compress", "topk:1"))
    assert_close(found, exact, 1e-12)


def test_what_topk_has_not_sent_is_in_the_checkpoint(world: World, tmp_path: Path) -> None:
    flags = ("--compress", "topk:0.02", "--optimizer", "momentum")
    before = served(world, 2, tmp_path, *flags, "--train-steps", "37")
    after = served(world, 3, tmp_path / "other", *flags, "--resume", str(tmp_path), "--train-steps", "37")
    for name in ("residual", "velocity"):
        (key,) = (key for key in before if key.endswith(f"unsent gradients/{name}"))
        assert before[key].any()
        np.testing.assert_allclose(after[key], before[key], rtol=1e-5, atol=1e-8)


def test_what_was_not_sent_is_dropped_with_a_notice_if_nothing_is_sent(world: World, tmp_path: Path) -> None:
    flags = ("--compress", "topk:0.02", "--optimizer", "momentum")
    served(world, 2, tmp_path, *flags, "--train-steps", "20")
    flags = ("--mode", "async", "--ps", "1", "--no-normalize", *flags, "--run-dir", str(tmp_path))
    done = world.train(3, SMALL, "--batch-size", "6", *flags, "--train-steps", "30")
    assert [line for line in done.stdout.splitlines() if "gradients/residual" in line and "dropped" in line]


@pytest.mark.parametrize(("codec", "part"), [("float32", 0.5), ("int8", 0.127)])
def test_bytes_of_compressed_gradients_are_counted(world: World, codec: str, part: float, tmp_path: Path) -> None:
    params = trained(served(world, 2, tmp_path, "--train-steps", "60", "--dtype", "float64", "--compress", codec))
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    (workers,) = [line["workers"] for line in lines if "workers" in line]
    for worker in workers:
        vectors = worker["moved_bytes"] / sum(values.nbytes for values in params.values())
        reads = vectors - part * worker["steps"]
        assert worker["steps"] <= reads <= worker["steps"] + 5
