"""The messages of ``docs/troubleshooting.md`` are those of the source, in alphabetical order."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ..support.launch import ROOT

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text("utf-8").split("\n## ")[0]
MESSAGES = re.findall(r"^\| `(.*?)` \|", PAGE, re.MULTILINE)


def _texts() -> Iterator[str]:
    """Yield the text of every string and template in the package, with dots in place of values."""
    for path in (ROOT / "mpitrain").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value
            elif isinstance(node, ast.JoinedStr):
                yield "".join(part.value if isinstance(part, ast.Constant) else "..." for part in node.values)
    for path in (ROOT / "mpitrain").rglob("*.j2"):
        yield path.read_text("utf-8")


def test_every_message_is_in_the_source() -> None:
    texts = list(_texts())
    parts = {part.strip(" :;,()") for message in MESSAGES for part in message.split("...")}
    absent = {part for part in parts if len(part) > 3 and not any(part in text for text in texts)}
    assert len(MESSAGES) > 20
    assert not absent


def test_messages_are_in_alphabetical_order() -> None:
    words = [message.replace("... ", "").lower() for message in MESSAGES]
    assert words == sorted(words)
