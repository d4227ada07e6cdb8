"""`command-line`: every command of `trueup`, from its own help."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

from docstrings import help_as_markdown


class CommandLine(SphinxDirective):
    """A section per command: what it does, and a table of its arguments and options."""

    def run(self) -> list[nodes.Node]:
        """Return the sections."""
        import typer.main

        from trueup import cli
        from trueup_lab.cli import add_commands

        app = cli.application()
        add_commands(app)
        return [self._section(*found) for found in _commands("trueup", typer.main.get_command(app))]

    def _section(self, name: str, command: Any) -> nodes.Node:
        section = nodes.section(ids=[nodes.make_id(name)], names=[name])
        section += nodes.title("", "", nodes.literal(text=name))
        self.state.document.note_implicit_target(section, section)
        rows = [f"| {what} | {meaning} |" for what, meaning in filter(None, map(_row, command.params))]
        table = ["| | |", "|---|---|", *rows] if rows else []
        section += self.parse_text_to_nodes("\n".join([help_as_markdown(command.help or ""), "", *table]))
        return section


def setup(app: Any) -> dict[str, bool]:
    """Add the directive."""
    app.add_directive("command-line", CommandLine)
    return {"parallel_read_safe": True}


def _commands(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    """Yield the commands without subcommands, by name."""
    if not hasattr(command, "commands"):
        yield name, command
        return
    for part, below in sorted(command.commands.items()):
        yield from _commands(f"{name} {part}", below)


def _row(parameter: Any) -> tuple[str, str] | None:
    """Name and meaning of an argument or option, as cells of a table."""
    if "--help" in parameter.opts or getattr(parameter, "hidden", False):
        return None
    argument = parameter.param_type_name == "argument"
    names = [parameter.name.upper()] if argument else [*parameter.opts, *parameter.secondary_opts]
    meaning = help_as_markdown(getattr(parameter, "help", None) or "")
    default = parameter.default
    if isinstance(default, str | int | float) and not isinstance(default, bool) and "default" not in meaning:
        meaning += f" Default: `{default}`."
    return ", ".join(f"`{name}`" for name in names), meaning
