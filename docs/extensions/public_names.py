"""`public-names`: the documentation of every public name of a module, from its docstring."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from docutils import nodes
from docutils.parsers.rst import directives
from docutils.statemachine import StringList
from sphinx.util.docutils import SphinxDirective


class PublicNames(SphinxDirective):
    """Document a module's public functions or classes: those of `first` in order, then all others but `except`."""

    required_arguments = 1
    option_spec = {  # noqa: RUF012  # docutils declares it so
        "kind": lambda word: directives.choice(word, ("functions", "classes")),
        "first": directives.unchanged,
        "except": directives.unchanged,
    }

    def run(self) -> list[nodes.Node]:
        """Return the nodes of all names."""
        module = importlib.import_module(self.arguments[0])
        wanted = inspect.isfunction if self.options["kind"] == "functions" else inspect.isclass
        first = self.options.get("first", "").split()
        left_out = {*first, *self.options.get("except", "").split()}
        names = [*first, *(name for name in _public(module) if name not in left_out)]
        lines: list[str] = []
        for name in names:
            if wanted(getattr(module, name)):
                lines += _autodoc(module.__name__, name, getattr(module, name))
        holder = nodes.Element()
        self.state.nested_parse(StringList(lines, source=__name__), 0, holder)
        return holder.children


def setup(app: Any) -> dict[str, bool]:
    """Add the directive."""
    app.add_directive("public-names", PublicNames)
    return {"parallel_read_safe": True}


def _public(module: Any) -> list[str]:
    listed = getattr(module, "__all__", None)
    if listed is not None:
        return list(listed)
    return [name for name, thing in vars(module).items() if name[0] != "_" and _home(thing) == module.__name__]


def _home(thing: Any) -> str | None:
    return getattr(thing, "__module__", None)


def _autodoc(module: str, name: str, thing: Any) -> list[str]:
    lines = [f".. auto{_kind(thing)}:: {module}.{name}"]
    if inspect.isclass(thing) and not issubclass(thing, Exception):
        lines += ["   :members:"]
    return [*lines, ""]


def _kind(thing: Any) -> str:
    if inspect.isfunction(thing):
        return "function"
    return "exception" if issubclass(thing, Exception) else "class"
