"""Sphinx configuration."""

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

from sphinx.util import logging  # noqa: E402
from sphinx.util.inspect import TypeAliasForwardRef  # noqa: E402

from mpitrain.version import __version__  # noqa: E402

logger = logging.getLogger(__name__)
project = "mpitrain"
author = "the mpitrain maintainers"
release = version = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_click", "public_names"]
exclude_patterns = ["_build"]
myst_heading_anchors = 3

# The reference, from docstrings.
autodoc_inherit_docstrings = False  # overridden methods are documented once, in the base class
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
# Aliases that are shorter than their types.
autodoc_type_aliases = {
    name: name
    for name in ("Array", "Shape", "Schedule", "Initializer", "Storage", "Memory", "Slots", "Pins", "SumOverWorkers")
}
python_use_unqualified_type_names = True
maximum_signature_line_length = 100
add_module_names = False
napoleon_attr_annotations = False  # signatures show the types
TypeAliasForwardRef.__repr__ = lambda self: self.name  # how Sphinx prints these names in unions


def simplify(app: object, what: str, name: str, member: object, options: object, given: Any, returned: Any) -> Any:
    """Omit the constructors of protocols; show defaults that dataclasses make as ``...``."""
    if given is not None:
        given = "" if getattr(member, "_is_protocol", False) else given.replace("<factory>", "...")
    return given, returned


def check(app: object, what: str, name: str, member: object, options: object, lines: list[str]) -> None:
    """Find text before a colon that napoleon has taken for a type; docstrings contain none."""
    if any(line.startswith((":type", ":rtype:")) for line in lines):
        logger.warning("docstring of %s: 'Returns' or a property's first line has a colon; use a semicolon", name)


def drop_empty_defaults(app: object, ctx: object, lines: list[str]) -> None:
    """Omit the default of an option that may be repeated: it is empty."""
    lines[:] = [line for line in lines if line.strip() != ":default: ````"]


def setup(app: Any) -> None:
    app.connect("autodoc-process-signature", simplify)
    app.connect("autodoc-process-docstring", check, priority=501)  # after napoleon
    app.connect("sphinx-click-process-options", drop_empty_defaults)


html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["mpitrain.css"]
html_copy_source = html_show_copyright = False
html_title = f"mpitrain {__version__}"
