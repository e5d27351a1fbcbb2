"""Write ``modules.md``, the list of all modules with the first lines of their docstrings."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "modules.md"
_HEAD = """# Modules

Every package and module with the first line of its docstring. `make docs` writes this page. Which package may import
which, and where to change what: [Architecture](architecture.md).
"""


def listing() -> str:
    """Return the page."""
    package, parts = ROOT / "mpitrain", [_HEAD]
    for init in sorted(package.rglob("__init__.py")):
        folder = init.parent
        modules = [path for path in sorted(folder.glob("*.py")) if path != init]
        if modules:
            name = ".".join(folder.relative_to(package).parts) or "mpitrain"
            operations = " The package itself has the code." if _has_code(init) else ""
            parts.append(f"## {name}\n\n{_first_line(init)}{operations}\n")
            parts.append("\n".join(f"- `{path.stem}`: {_first_line(path)}" for path in modules) + "\n")
    return "\n".join(parts)


def _has_code(path: Path) -> bool:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return any(isinstance(each, ast.FunctionDef | ast.ClassDef) for each in tree.body)


def _first_line(path: Path) -> str:
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return docstring.partition("\n\n")[0].replace("\n", " ").replace("``", "`")


if __name__ == "__main__":
    PAGE.write_text(listing(), encoding="utf-8")
