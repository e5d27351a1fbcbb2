"""``docs/architecture.md`` lists what exists."""

from __future__ import annotations

import configparser
import re

from ..support.launch import ROOT

PACKAGE = ROOT / "mpitrain"
PAGE = (ROOT / "docs" / "architecture.md").read_text()


def listed_modules() -> dict[str, set[str]]:
    """Return the names in code in the entry of each package; one entry may be for several packages."""
    section = PAGE.partition("\n## Modules\n")[2].partition("\n## ")[0]
    entries = re.findall(r"^(`[^\n]*`)\n: (.*?)(?=\n\n|\Z)", section, re.MULTILINE | re.DOTALL)
    names = {head: set(re.findall(r"`([\w.]+)`", text)) for head, text in entries}
    return {package: names[head] for head in names for package in re.findall(r"`(.*?)`", head)}


def modules() -> dict[str, set[str]]:
    """Return the names of the modules of each package."""
    found: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        package = ".".join(path.parent.relative_to(PACKAGE).parts)
        if package and path.name != "__init__.py":
            found.setdefault(package, set()).add(path.stem)
    return found


def test_every_module_is_listed_with_its_package() -> None:
    listed = listed_modules()
    missing = {package: names - listed.get(package, set()) for package, names in modules().items()}
    assert {package: names for package, names in missing.items() if names} == {}


def test_the_levels_are_those_that_are_checked() -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    layers = config["importlinter:contract:layers"]["layers"].split("\n")
    checked = [set(re.split(r"\s*\|\s*", line)) for line in layers if line and line != "__main__"]
    rows = re.findall(r"^\| (\d+) \| (.*?) \|", PAGE, re.MULTILINE)
    assert [int(level) for level, _ in rows] == [*range(len(checked), 0, -1)]
    assert [set(re.findall(r"`(\w+)`", packages)) for _, packages in rows] == checked


def test_every_file_that_the_page_names_exists() -> None:
    named = set(re.findall(r"`((?:\w+/)+[\w.]*)`", PAGE)) - {"core/ops"}
    missing = {name for name in named if not (PACKAGE / name).exists() and not (ROOT / name).exists()}
    assert missing == set()
