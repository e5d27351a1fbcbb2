"""A Sphinx directive that documents the public names of a module from their docstrings.

``.. public-names:: mpitrain.nn`` documents every name in ``__all__``, so that no name can be forgotten. With the option
``:base: Layer`` it documents the class ``Layer`` and its subclasses only; a later directive of the page for the same
module omits these.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from types import ModuleType
from typing import Any, ClassVar

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.pycode import ModuleAnalyzer
from sphinx.util.docutils import SphinxDirective


class PublicNames(SphinxDirective):
    """Documents the names in a module's ``__all__``."""

    required_arguments = 1
    option_spec: ClassVar = {"base": str}

    def run(self) -> list[nodes.Node]:
        module = importlib.import_module(self.arguments[0])
        self.env.note_dependency(str(module.__file__))
        shown = self.env.temp_data.setdefault("public names", set())
        names = [name for name in module.__all__ if (module, name) not in shown]
        if "base" in self.options:
            base = getattr(module, self.options["base"])
            names = [name for name in names if _is_subclass(getattr(module, name), base)]
            names.sort(key=lambda name: getattr(module, name) is not base)
        names.sort(key=lambda name: isinstance(getattr(module, name), ModuleType))  # at the end
        shown.update((module, name) for name in names)
        return self.parse_text_to_nodes("\n".join(_entry(module, name) for name in names))


def _is_subclass(value: object, base: type) -> bool:
    return isinstance(value, type) and issubclass(value, base)


def _entry(module: ModuleType, name: str) -> str:
    """Return the directive that documents a name.

    Raises:
        ExtensionError: The name has no docstring.
    """
    value: Any = getattr(module, name)
    path = f"{module.__name__}.{name}"
    if isinstance(value, ModuleType):
        # The page of a package is required: a missing one is an error of Sphinx.
        return f"* :doc:`{name}`: {_first_line(value)}\n"
    if isinstance(value, type) and value.__doc__:
        return f".. autoclass:: {path}\n   :members:\n   :special-members: __call__\n"
    if inspect.isroutine(value) and value.__doc__:
        return f".. autofunction:: {path}\n"
    return f".. autodata:: {_module_with_comment(module, name)}.{name}\n"


def _module_with_comment(package: ModuleType, name: str) -> str:
    """Return the module of a package that assigns a name and documents it with a comment ``#:``."""
    for module in sorted(each for each in sys.modules if each.startswith(package.__name__)):
        if ("", name) in ModuleAnalyzer.for_module(module).find_attr_docs():
            return module
    raise ExtensionError(f"{package.__name__}.{name} has no docstring, nor a comment '#:' where it is assigned")


def _first_line(module: ModuleType) -> str:
    return (module.__doc__ or "").splitlines()[0]


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive."""
    app.add_directive("public-names", PublicNames)
    return {"parallel_read_safe": True}
