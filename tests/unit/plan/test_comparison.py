"""Texts of functions: the same in another process and of another file, and others for other values and code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mpitrain.plan.comparison import code_of, values_of

SOURCE = """
import functools
import sys
import numpy as np
from mpitrain import nn

def plain(outputs, labels, power=2, *, scale=1.5, kinds=("a", "b")):
    "A function."
    return (outputs - labels) ** power * scale if labels in {"mean", "sum", "none"} else 1.0

def enclosing(weight, inner=None):
    def loss(outputs, labels):
        return weight * outputs if labels is None else loss(outputs, None)
    return loss

class Own(nn.MeanSquaredError):
    def __init__(self, power):
        super().__init__()
        self.power = power

    def __call__(self, outputs, labels, weight):
        return 1.0, outputs * 3

class Callable:
    def __init__(self, path):
        self.size, self.path, self.cycle, self.file = 4, path, self, sys.stdout

    def __call__(self, outputs):
        return self.size

values = [plain, enclosing(np.ones(3)), Own(2), Callable("/" + __file__), functools.partial(plain, power=3),
          Callable(1).__call__, nn.SoftmaxCrossEntropy(), None]

if __name__ == "__main__":
    from mpitrain.plan.comparison import code_of, values_of
    for value in values:
        print(values_of(value), code_of(value))
"""


def texts_of_process(path: Path, source: str, seed: str) -> list[str]:
    path.parent.mkdir()
    path.write_text(source)
    env = os.environ | {"PYTHONHASHSEED": seed}
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, check=True, env=env, timeout=120)
    return done.stdout.splitlines()


def texts(source: str) -> list[str]:
    module: dict[str, Any] = {"__name__": "job", "__file__": "job.py"}
    exec(compile(source, "job.py", "exec"), module)
    return [f"{values_of(value)} {code_of(value)}" for value in module["values"]]


def test_another_process_and_file_gives_the_same(tmp_path: Path) -> None:
    first = texts_of_process(tmp_path / "first" / "job.py", SOURCE, "1")
    assert first == texts_of_process(tmp_path / "second" / "other.py", "\n\n# moved\n" + SOURCE, "2")
    assert len(first) == 8 and str(tmp_path) not in "".join(first)


@pytest.mark.parametrize(
    ("old", "new", "changed"),
    [
        ("scale=1.5", "scale=2.5", "scale=2.5"),
        ('("a", "b")', '("a", "c")', "kinds.1='c'"),
        ("else 1.0", "else 2.0", ""),
        ('"none"}', '"max"}', ""),
        ("outputs - labels", "outputs + labels", ""),
        ("np.ones(3)", "np.ones(3) * 2", "weight=array of shape (3,), mean 2"),
        ("Own(2)", "Own(3)", "power=3"),
        ("outputs * 3", "outputs * 4", ""),
        ("self.file = 4", "self.file = 5", "size=5"),
        ("plain, power=3)", "plain, power=4)", "power=4"),
        ("nn.SoftmaxCrossEntropy()", "nn.SigmoidCrossEntropy()", "SigmoidCrossEntropy"),
    ],
)
def test_another_value_or_code_gives_another_text(old: str, new: str, changed: str) -> None:
    assert old in SOURCE
    before, after = texts(SOURCE), texts(SOURCE.replace(old, new))
    different = [text for text in after if text not in before]
    assert different and all(changed in text for text in different)
