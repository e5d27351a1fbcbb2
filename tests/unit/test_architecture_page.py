"""``docs/architecture.md`` and ``docs/modules.md`` describe the packages and modules as they are."""

from __future__ import annotations

import ast
import configparser
import re
import runpy
import sys
from pathlib import Path

from ..support.launch import ROOT

PACKAGE = ROOT / "mpitrain"
# The names under which projects are imported, if they differ from the names on the page.
IMPORTED_AS = {
    "docstring-parser": "docstring_parser",
    "tomli-w": "tomli_w",
    "ml-dtypes": "ml_dtypes",
    "nvidia-ml-py": "pynvml",
    "mlflow-skinny": "mlflow",
    "nvidia-cudnn-frontend": "cudnn",
}
PARTS_OF = {"cupy_backends": "cupy", "cuda": "cupy"}  # packages that are installed with CuPy
PAGE = (ROOT / "docs" / "architecture.md").read_text()


def test_the_list_of_modules_is_that_of_the_docstrings() -> None:
    script = runpy.run_path(str(ROOT / "docs" / "module_list.py"))
    assert script["PAGE"].read_text() == script["listing"](), "run make docs"


def test_the_levels_are_those_that_are_checked() -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    layers = config["importlinter:contract:layers"]["layers"].split("\n")
    checked = [set(re.split(r"\s*\|\s*", line)) for line in layers if line and "__main__" not in line]
    rows = re.findall(r"^\| (\d+) \| (.*?) \|", PAGE, re.MULTILINE)
    assert [int(level) for level, _ in rows] == [*range(len(checked), 0, -1)]
    assert [set(re.findall(r"`(\w+)`", packages)) for _, packages in rows] == checked


def test_every_file_that_the_page_names_exists() -> None:
    named = set(re.findall(r"`((?:\w+/)+[\w.]*)`", PAGE)) - {"core/ops"}
    missing = {name for name in named if not (PACKAGE / name).exists() and not (ROOT / name).exists()}
    assert missing == set()


def listed_importers() -> dict[str, set[str]]:
    """Return the packages and modules that the page lists for each project, by the project's name in imports."""
    section = PAGE.partition("\n## Dependencies\n")[2]
    importers: dict[str, set[str]] = {}
    for projects, modules_of, _ in re.findall(r"^\| ([\w, .()-]+) \| ([^|]*) \| ([^|]*) \|$", section, re.MULTILINE)[
        1:
    ]:
        names = [re.sub(r"\(.*?\)", "", name).strip() for name in projects.split(",")]
        everywhere = {""} if modules_of.strip() == "everywhere" else set()
        for name in names:
            importers[IMPORTED_AS.get(name, name)] = set(re.findall(r"`([\w.]+)`", modules_of)) | everywhere
    return importers


def names_used(path: Path, projects: set[str]) -> tuple[set[str], set[str]]:
    """Return the other projects that a module imports, and those of ``projects`` that its strings name.

    Strings count because modules may import by name.
    """
    imported, named = set(), set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            imported.add(str(node.module).partition(".")[0])
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            named.add(node.value.partition(".")[0])
    imported = {
        PARTS_OF.get(name, name)
        for name in imported - sys.stdlib_module_names - {"mpitrain", "mpitrain_torch", "tomllib"}
    }
    return imported, named & projects


def test_the_table_of_dependencies_lists_all_imports_and_no_others() -> None:
    listed = listed_importers()
    missing, used = set(), set()
    for path in PACKAGE.rglob("*.py"):
        module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")
        imported, named = names_used(path, set(listed))
        for name in imported | named:
            covering = {entry for entry in listed.get(name, ()) if not entry or f"{module}.".startswith(f"{entry}.")}
            used |= {(name, entry) for entry in covering}
            if name in imported and not covering:
                missing.add((name, module))
    assert missing == set()
    assert {(name, entry) for name, entries in listed.items() for entry in entries} - used == set()


def test_tests_of_a_module_are_found_by_its_path() -> None:
    """For example, ``nn/test_loss.py`` and ``nn/test_loss_of_tokens.py`` both test ``nn/loss.py``."""
    unit = ROOT / "tests" / "unit"
    for path in unit.rglob("*/test_*.py"):
        package = ROOT / "mpitrain" / path.parent.relative_to(unit)
        modules = {module.stem for module in package.glob("[!_]*")}
        tested = path.stem.removeprefix("test_")
        is_mirrored = any(f"{tested}_".startswith(f"{module}_") for module in modules)
        assert is_mirrored or package.name == "simulators", path
