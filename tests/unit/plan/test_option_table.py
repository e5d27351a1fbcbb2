"""What is said about options stands in their fields alone; see ``plan.option.OptionInfo``."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

import mpitrain
from mpitrain.plan.config import FIELDS, GROUPS
from mpitrain.plan.launch_options import LaunchOptions
from mpitrain.plan.option import info_of, value_of
from mpitrain.plan.program import ProgramOptions

PACKAGE = Path(mpitrain.__file__).parent
NAMES = {field.name for group in (*GROUPS, LaunchOptions, ProgramOptions) for field in dataclasses.fields(group)}
UNSET = {name for name, field in FIELDS.items() if info_of(field).if_none is not None}


def texts(nodes: list[ast.expr]) -> list[str]:
    return [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]


def lists_of_names(tree: ast.AST) -> Iterator[int]:
    """Yield the lines of tuples, lists, sets, strings and dicts of texts that consist of names of options."""
    for node in ast.walk(tree):
        words: list[str] = []
        if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
            words = texts(node.elts) if len(texts(node.elts)) == len(node.elts) else []
        elif isinstance(node, ast.Dict) and len(texts(node.values)) == len(node.values):
            words = texts([key for key in node.keys if key is not None])
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            words = node.value.split()
        if len(words) > 1 and NAMES.issuperset(words):
            yield node.lineno


def defaults(tree: ast.AST) -> Iterator[int]:
    """Yield the lines of expressions that give an option a value if it is None, such as ``x.prefetch or 2``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.Or):
            tested, other = node.values[0], node.values[-1]
        elif isinstance(node, ast.IfExp) and isinstance(node.test, ast.Compare):
            tested = node.test.left
            other = node.body if isinstance(node.test.ops[0], ast.Is) else node.orelse
        else:
            continue
        if isinstance(tested, ast.Attribute) and tested.attr in UNSET and isinstance(other, ast.Constant):
            yield node.lineno


@pytest.mark.parametrize("find", [lists_of_names, defaults])
def test_no_second_list_of_options_and_no_second_default(find) -> None:  # type: ignore[no-untyped-def]
    found = [
        f"{path.relative_to(PACKAGE)}:{line}"
        for path in PACKAGE.rglob("*.py")
        for line in find(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not found


@pytest.mark.parametrize(
    ("find", "code"),
    [
        (lists_of_names, "('mode', 'staleness')"),
        (lists_of_names, "'local_steps seed'.split()"),
        (lists_of_names, "{'seed': 'why', 'mode': 'how'}"),
        (defaults, "training.prefetch or 2"),
        (defaults, "3 if parallel.staleness is None else parallel.staleness"),
        (defaults, "parallel.staleness if parallel.staleness is not None else 3"),
    ],
)
def test_the_search_finds(find, code: str) -> None:  # type: ignore[no-untyped-def]
    assert list(find(ast.parse(code))) == [1]


def test_every_default_is_used_by_a_property() -> None:
    properties = [value for group in GROUPS for value in vars(group).values() if isinstance(value, property)]
    assert len([value for value in properties if value.fget.__qualname__.startswith(value_of.__name__)]) == len(UNSET)
